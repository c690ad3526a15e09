#include "engine/load/load_batch.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/crc.h"
#include "format/zip_frame.h"
#include "geometry/overlap.h"

namespace torch_ckpt {
namespace {

// Slices up to this length are read whole. For a longer slice, the frame is read first.
constexpr int64_t kWholeSliceNbytes = int64_t{128} << 10;

// Rows of a stored tensor are read as one range if the gap between them is at most this long.
constexpr int64_t kMaxRowGap = int64_t{32} << 10;

// A record is checked if at most this much of it is not read anyway.
int64_t max_unread(int64_t record_nbytes) { return std::max(record_nbytes / 16, kMaxRowGap); }

Dims in_bytes(const std::vector<int64_t>& strides, int64_t itemsize) {
  Dims out(strides.begin(), strides.end());
  for (int64_t& stride : out) stride *= itemsize;
  return out;
}

// Reads the checksums of a range, so that a damaged index is an error before any tensor is written.
Status check_sums(const FileSums* sums, const ByteRange& range) {
  return sums == nullptr ? ok_status() : sums->check(range);
}

}  // namespace

LoadBatch::LoadBatch(const BatchContext& context)
    : stream_(context.stream),
      files_(context.files),
      index_(context.index),
      records_(context.records),
      quantized_(context.quantized),
      dequantized_(context.dequantized),
      verify_(context.verify),
      slices_are_archives_(context.slices_are_archives),
      tensors_(context.tensors),
      bytes_(context.bytes),
      result_(context.result),
      loaded_nbytes_(context.loaded_nbytes),
      temporaries_(context.hand_over),
      whole_slice_nbytes_(std::min(kWholeSliceNbytes, context.stream.max_range_nbytes())) {}

Status LoadBatch::check_slice(const StoredSlice& slice) const {
  return check_extent(slice, file_of(slice).nbytes);
}

Status LoadBatch::plan(const std::vector<int64_t>& tensor_indices,
                       const std::vector<int64_t>& byte_indices) {
  for (const int64_t i : tensor_indices) RETURN_IF_ERROR(check_slice(tensor(i).slice));
  for (const int64_t i : byte_indices) {
    RETURN_IF_ERROR(check_slice(bytes_[static_cast<size_t>(i)]));
  }
  RETURN_IF_ERROR(find_tensors(tensor_indices));
  for (const int64_t i : byte_indices) RETURN_IF_ERROR(plan_bytes(i));
  byte_indices_ = byte_indices;
  plan_records();
  return ok_status();
}

// Checks that this rank reaches the files of ranges that it is about to read.
Status LoadBatch::check_reach(std::span<const WantedRange> wanted) const {
  std::map<const File*, const AwayFile*> away;
  for (const auto& [name, file] : files_) {
    if (file.away != nullptr) away.emplace(file.file.get(), file.away);
  }
  for (const WantedRange& want : wanted) {
    const auto found = away.find(want.file);
    if (found == away.end()) continue;
    const Status refused = found->second->refusal();
    if (want.name == nullptr) return refused;
    return Status(refused.code(), str_cat("cannot load '", *want.name, "': ", refused.message()));
  }
  return ok_status();
}

Status LoadBatch::run() {
  RETURN_IF_ERROR(check_reach(wanted_));
  for (const WantedRange& want : wanted_) RETURN_IF_ERROR(check_sums(want.sums, want.range));
  RETURN_IF_ERROR(stream_.run(wanted_, [this](int64_t index, Bytes bytes, Unpacking& unpacking) {
    return consume(index, bytes, unpacking);
  }));
  return verify();
}

Status LoadBatch::run(ExchangeStream& exchange, std::span<const ExchangePiece> pieces) {
  std::vector<SharedPiece> shared;
  for (const ExchangePiece& piece : pieces) {
    const std::string& name = exchange.files()[static_cast<size_t>(piece.file)];
    const OpenFile& file = files_.find(name)->second;
    if (piece.range.end > file.nbytes) {
      return corruption("cannot read to ", piece.range.end, " of ", name, ": it has ", file.nbytes,
                        " bytes");
    }
    shared.push_back({file.file.get(), piece.range, piece.from, piece.to, file.sums.get()});
    if (piece.from < 0 && file.away != nullptr) return file.away->refusal();
    if (piece.from < 0) RETURN_IF_ERROR(check_sums(file.sums.get(), piece.range));
  }
  const ConsumeRange consume_one = [this](int64_t index, Bytes bytes, Unpacking& unpacking) {
    return consume(index, bytes, unpacking);
  };
  Assembly assembly(wanted_, shared, consume_one);
  std::vector<WantedRange> alone;
  for (const int64_t index : assembly.others()) {
    alone.push_back(wanted_[static_cast<size_t>(index)]);
    RETURN_IF_ERROR(check_sums(alone.back().sums, alone.back().range));
  }
  RETURN_IF_ERROR(check_reach(alone));

  std::atomic<bool> stopped = false;
  const auto read_alone = [&] {
    const ExchangeStream::Busy busy(exchange);
    const ConsumeRange consume_alone = [&](int64_t index, Bytes bytes, Unpacking& unpacking) {
      if (stopped) return cancelled("the exchange of this load has failed");
      return consume(assembly.others()[static_cast<size_t>(index)], bytes, unpacking);
    };
    const Status status = stream_.run(alone, consume_alone);
    if (!status.ok()) exchange.fail(status);
    return status;
  };
  Status status_alone;
  std::thread reading;
  try {
    reading = std::thread([&] {
      try {
        status_alone = read_alone();
      } catch (const std::exception& error) {
        status_alone = internal_error("cannot continue reading: ", error.what());
        exchange.fail(status_alone);
      }
    });
  } catch (const std::system_error&) {
    // The system has no more threads: read after the exchange.
  }
  const Status status = exchange.run(shared, assembly);
  stopped = !status.ok();
  if (reading.joinable()) {
    reading.join();
  } else if (status.ok()) {
    status_alone = read_alone();
  }
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(status_alone);
  return verify();
}

Status LoadBatch::verify() const {
  if (!verify_) return ok_status();
  RETURN_IF_ERROR(verify_records());
  return verify_bytes();
}

// Locates the wanted tensors through the index, or through their frames if there is no index. The
// frame of a short slice is read together with its payload.
Status LoadBatch::find_tensors(const std::vector<int64_t>& requests) {
  if (index_ != nullptr) {
    for (const int64_t i : requests) {
      const auto dequantization = dequantized_.find(i);
      if (dequantization != dequantized_.end()) {
        plan_dequantized(i, dequantization->second);
        continue;
      }
      std::optional<StoredTensor> found = known(i);
      if (!found) {
        ASSIGN_OR_RETURN(found, index_->tensor(tensor(i).slice));
      }
      RETURN_IF_ERROR(plan_tensor(i, found));
    }
    return ok_status();
  }
  std::vector<SliceInFile> framed;
  for (const int64_t i : requests) {
    const StoredSlice& slice = tensor(i).slice;
    const OpenFile& file = file_of(slice);
    if (slice.nbytes > whole_slice_nbytes_)
      framed.push_back({&slice, file.file.get(), file.sums.get()});
  }
  ASSIGN_OR_RETURN(const Frames frames, read_frames(stream_, framed));
  for (const int64_t i : requests) {
    const StoredSlice& slice = tensor(i).slice;
    if (slice.nbytes <= whole_slice_nbytes_) continue;
    RETURN_IF_ERROR(plan_tensor(i, frames.find({slice.file, slice.offset})->second));
  }
  for (const int64_t i : requests) {
    const StoredSlice& slice = tensor(i).slice;
    if (slice.nbytes > whole_slice_nbytes_) continue;
    if (lacks_memory(i)) expect(i);
    whole_slices_.push_back(i);
    wanted_.push_back(want(i, {slice.offset, slice.offset + slice.nbytes}, nullptr));
  }
  return ok_status();
}

// Whether the engine copies the stored tensor. If not, the request is left to torch.
Result<bool> LoadBatch::accepts(int64_t request, const StoredTensor& stored) {
  const TensorRequest& wanted = tensor(request);
  if (stored.dtype != wanted.live.dtype) {
    leave_to_torch(request);
    return false;
  }
  if (!lies_within(wanted.box, stored.sizes)) {
    return mismatch("cannot read ", to_string(wanted.box), " of ", describe(wanted.slice),
                    ": the stored tensor has sizes ", to_string(stored.sizes));
  }
  return true;
}

// Returns the tensor as it is stored, if it is known without the index. The index describes a
// quantised tensor as loads see it.
std::optional<StoredTensor> LoadBatch::known(int64_t request) const {
  if (tensor(request).stored) return tensor(request).stored;
  const StoredSlice& slice = tensor(request).slice;
  if (quantized_ == nullptr) return std::nullopt;
  const auto found = quantized_->find(slice.name);
  if (found == quantized_->end()) return std::nullopt;
  const QuantizedTensor& facts = found->second;
  StoredTensor stored;
  stored.dtype = facts.dtype;
  stored.sizes = facts.sizes;
  stored.strides = contiguous_strides(facts.sizes);
  stored.payload_nbytes = slice.nbytes;
  return stored;
}

// Its numbers are never read in place.
void LoadBatch::plan_dequantized(int64_t request, const Dequantization& dequantization) {
  const FileSums* sums = file_of(tensor(request).slice).sums.get();
  const int64_t payload = tensor(request).slice.offset;
  for (auto& [range, box] : dequantization.cut(stream_.max_range_nbytes(sums), kMaxRowGap)) {
    wanted_.push_back(want(request, {payload + range.begin, payload + range.end}, nullptr));
    if (lacks_memory(request)) {
      expect(request);
      wanted_.back().group = request;
    }
    pieces_.push_back({.request = request,
                       .copy = {},
                       .one_run = false,
                       .to_be_summed = false,
                       .numbers = std::move(box)});
  }
}

Status LoadBatch::plan_tensor(int64_t request, const std::optional<StoredTensor>& found) {
  const TensorRequest& wanted = tensor(request);
  if (!found.has_value()) {
    leave_to_torch(request);
    return ok_status();
  }
  const StoredTensor& stored = *found;
  ASSIGN_OR_RETURN(const bool accepted, accepts(request, stored));
  if (!accepted) return ok_status();

  const int64_t size = itemsize(stored.dtype);
  const int64_t payload = wanted.slice.offset + stored.payload_offset;
  const StridedCopy copy = copy_of_box(wanted.box, size, payload + stored.storage_offset * size,
                                       in_bytes(stored.strides, size), wanted.live.strides);

  const FileSums* sums = file_of(wanted.slice).sums.get();
  for (StridedCopy& piece : cut(copy, sums)) {
    const bool one_run = is_one_run(piece);
    const bool to_hand_over = lacks_memory(request);
    if (to_hand_over) expect(request);
    std::byte* destination =
        one_run && !to_hand_over ? wanted.live.data + piece.dst_offset : nullptr;
    wanted_.push_back(want(request, source_range(piece), destination));
    // Reads the pieces of one temporary together, so that its memory is freed soon.
    if (to_hand_over) wanted_.back().group = request;
    pieces_.push_back({request, std::move(piece), one_run, false});
    if (verify_ && sums == nullptr) touch_record(wanted.slice, stored, std::ssize(pieces_) - 1);
  }
  return ok_status();
}

// Notes that a piece lies in a record: the payload of its tensor, or one of the file's records.
void LoadBatch::touch_record(const StoredSlice& slice, const StoredTensor& stored, int64_t piece) {
  const ByteRange& range = wanted_[static_cast<size_t>(piece)].range;
  std::optional<StoredRecord> record;
  // torch.save writes 0 if it is configured not to compute checksums.
  if (stored.payload_crc != 0) {
    const int64_t begin = slice.offset + stored.payload_offset;
    record = StoredRecord{{begin, begin + stored.payload_nbytes}, stored.payload_crc};
  } else if (records_ != nullptr) {
    record = records_->find(slice.file, range);
  }
  if (!record || range.nbytes() == 0) return;
  TouchedRecord& touched = touched_[{slice.file, record->range.begin}];
  touched.record = *record;
  touched.pieces.push_back(piece);
}

// Decides which records are checked.
void LoadBatch::plan_records() {
  for (auto next = touched_.begin(); next != touched_.end();) {
    plan_record(next->first.first, next->second);
    next = next->second.parts.empty() ? touched_.erase(next) : std::next(next);
  }
}

// Finds the parts of a record if it is to be checked. Where pieces overlap, one of them is a part.
void LoadBatch::plan_record(const std::string& file, TouchedRecord& touched) {
  const StoredRecord& record = touched.record;
  const auto range_of = [&](int64_t piece) -> const ByteRange& {
    return wanted_[static_cast<size_t>(piece)].range;
  };
  std::sort(touched.pieces.begin(), touched.pieces.end(),
            [&](int64_t a, int64_t b) { return range_of(a).begin < range_of(b).begin; });
  std::vector<int64_t> used;
  int64_t end = record.range.begin;
  int64_t gap_nbytes = 0;
  for (const int64_t piece : touched.pieces) {
    if (range_of(piece).begin < end) continue;
    gap_nbytes += range_of(piece).begin - end;
    end = range_of(piece).end;
    used.push_back(piece);
  }
  gap_nbytes += record.range.end - end;
  const bool must = records_ != nullptr && records_->must_check(file, record);
  if (!must && gap_nbytes > max_unread(record.range.nbytes())) return;

  const WantedRange any = wanted_[static_cast<size_t>(touched.pieces.front())];
  const auto read_gap = [&](int64_t begin, int64_t gap_end) {
    const int64_t most = stream_.max_range_nbytes();
    while (begin < gap_end) {
      const ByteRange range = {begin, std::min(begin + most, gap_end)};
      touched.parts.push_back({true, std::ssize(gap_crcs_), range.nbytes()});
      gap_crcs_.push_back(0);
      wanted_.push_back({.file = any.file, .range = range, .name = any.name});
      begin = range.end;
    }
  };
  end = record.range.begin;
  for (const int64_t index : used) {
    const ByteRange range = range_of(index);
    read_gap(end, range.begin);
    end = range.end;
    touched.parts.push_back({false, index, range.nbytes()});
    pieces_[static_cast<size_t>(index)].to_be_summed = true;
    // The CRC is computed in host memory.
    WantedRange& want = wanted_[static_cast<size_t>(index)];
    if (!want.device->is_host()) want.destination = nullptr;
  }
  read_gap(end, record.range.end);
}

// Cuts a copy into pieces that fit a buffer. A run of bytes is cut so that most of it can be read
// in place: at block boundaries if blocks are verified, else at the alignment of direct reads.
std::vector<StridedCopy> LoadBatch::cut(const StridedCopy& copy, const FileSums* sums) const {
  const int64_t most = stream_.max_range_nbytes(sums);
  if (checked_numel(copy.sizes) == 0 || !is_one_run(copy)) {
    return split_by_source(copy, most, kMaxRowGap);
  }
  const int64_t most_aligned = stream_.max_aligned_range_nbytes(sums);
  const ByteRange run = source_range(copy);
  if (run.begin % copy.itemsize != 0) {  // Elements may cross block boundaries.
    return split_by_source(copy, most, kMaxRowGap);
  }
  if (sums == nullptr) {
    const bool aligned = run.begin % kReadAlignment == 0;
    return split_by_source(copy, aligned ? most_aligned : most, kMaxRowGap);
  }
  std::vector<StridedCopy> pieces;
  const int64_t body = std::min(align_up(run.begin, sums->block_nbytes), run.end);
  const int64_t rest = std::max(body, align_down(run.end, sums->block_nbytes));
  for (const ByteRange& range : {ByteRange{run.begin, body}, {body, rest}, {rest, run.end}}) {
    for (int64_t begin = range.begin; begin < range.end; begin += most_aligned) {
      pieces.push_back(slice_run(copy, {begin, std::min(range.end, begin + most_aligned)}));
    }
  }
  return pieces;
}

Status LoadBatch::plan_bytes(int64_t request) {
  const StoredSlice& slice = bytes_[static_cast<size_t>(request)];
  LoadedBytes& loaded = result_.bytes[static_cast<size_t>(request)];
  loaded.data.reset(new (std::nothrow) std::byte[static_cast<size_t>(slice.nbytes)]);
  if (loaded.data == nullptr) {
    return with_slice(errno_status(ENOMEM, "cannot allocate its bytes"), slice);
  }
  loaded.nbytes = slice.nbytes;
  const int64_t most = stream_.max_range_nbytes(file_of(slice).sums.get());
  for (int64_t begin = 0; begin < slice.nbytes; begin += most) {
    const int64_t end = std::min(begin + most, slice.nbytes);
    const ByteRange range = {slice.offset + begin, slice.offset + end};
    wanted_.push_back(want(slice, range, loaded.data.get() + begin));
  }
  return ok_status();
}

Status LoadBatch::consume(int64_t index, Bytes bytes, Unpacking& unpacking) {
  const auto gap = index - (std::ssize(wanted_) - std::ssize(gap_crcs_));
  if (gap >= 0) {
    gap_crcs_[static_cast<size_t>(gap)] = crc32(0, bytes);
    return ok_status();
  }
  loaded_nbytes_.fetch_add(ssize(bytes), std::memory_order_relaxed);
  if (index < static_cast<int64_t>(pieces_.size())) {
    return consume_piece(pieces_[static_cast<size_t>(index)], bytes, unpacking);
  }
  const int64_t slice_index = index - static_cast<int64_t>(pieces_.size());
  if (slice_index < static_cast<int64_t>(whole_slices_.size())) {
    return consume_whole_slice(whole_slices_[static_cast<size_t>(slice_index)], bytes, unpacking);
  }
  std::byte* destination = wanted_[static_cast<size_t>(index)].destination;
  if (bytes.data() != destination) std::copy(bytes.begin(), bytes.end(), destination);
  return ok_status();
}

// Returns the memory for the elements of a request: the live tensor's, or a temporary.
Result<std::byte*> LoadBatch::memory_of(int64_t request) {
  if (lacks_memory(request)) return temporaries_.memory(request);
  return tensor(request).live.data;
}

Status LoadBatch::arrived(int64_t request) {
  return lacks_memory(request) ? temporaries_.arrived(request) : ok_status();
}

void LoadBatch::expect(int64_t request) {
  const LiveTensor& live = tensor(request).live;
  temporaries_.expect(request, checked_numel(live.sizes).value_or(0) * itemsize(live.dtype));
}

// Adds the copy of a request's elements to `unpacking`. The source offsets of `copy` count from
// `from`.
Status LoadBatch::put(int64_t request, const StridedCopy& copy, const std::byte* from,
                      Unpacking& unpacking) {
  ASSIGN_OR_RETURN(std::byte * memory, memory_of(request));
  const TensorRequest& wanted = tensor(request);
  return unpacking.add(*wanted.live.device, wanted.slice.name, memory, copy, from);
}

Status LoadBatch::consume_piece(Piece& piece, Bytes bytes, Unpacking& unpacking) {
  const Device& device = *tensor(piece.request).live.device;
  ASSIGN_OR_RETURN(std::byte * memory, memory_of(piece.request));
  const auto dequantization = dequantized_.find(piece.request);
  if (dequantization != dequantized_.end()) {
    const LiveTensor& live = tensor(piece.request).live;
    RETURN_IF_ERROR(unpacking.add_dequantized(device, tensor(piece.request).slice.name, memory,
                                              live.strides, dequantization->second, piece.numbers,
                                              bytes.data()));
    return arrived(piece.request);
  }
  std::byte* destination = memory + piece.copy.dst_offset;
  const bool in_place = bytes.data() == destination;
  if (piece.to_be_summed && piece.one_run && !in_place && device.is_host()) {
    piece.crc = copy_and_checksum(bytes, {destination, bytes.size()}, 0);
    return arrived(piece.request);
  }
  if (!in_place) {
    StridedCopy copy = piece.copy;
    copy.src_offset = 0;  // `bytes` begin at the first source byte.
    RETURN_IF_ERROR(put(piece.request, copy, bytes.data(), unpacking));
  }
  if (piece.to_be_summed) piece.crc = crc32(0, bytes);
  return arrived(piece.request);
}

Status LoadBatch::consume_whole_slice(int64_t request, Bytes bytes, Unpacking& unpacking) {
  const TensorRequest& wanted = tensor(request);
  const Result<StoredTensor> parsed = parse_frame(bytes, bytes, ssize(bytes));
  if (parsed.status().code() == StatusCode::kUnsupported) {
    leave_to_torch(request);
    return ok_status();
  }
  if (!parsed.ok()) return with_slice(parsed.status(), wanted.slice);
  const StoredTensor& stored = *parsed;
  ASSIGN_OR_RETURN(const bool accepted, accepts(request, stored));
  if (!accepted) return ok_status();

  const Bytes payload = slice(bytes, stored.payload_offset, stored.payload_nbytes);
  if (verify_ && stored.payload_crc != 0 && crc32(0, payload) != stored.payload_crc) {
    return corruption("cannot read ", describe(wanted.slice), ": its checksum does not match");
  }
  const int64_t size = itemsize(stored.dtype);
  const StridedCopy copy = copy_of_box(wanted.box, size, stored.storage_offset * size,
                                       in_bytes(stored.strides, size), wanted.live.strides);
  RETURN_IF_ERROR(put(request, copy, payload.data(), unpacking));
  return arrived(request);
}

Status LoadBatch::verify_records() const {
  for (const auto& [at, touched] : touched_) {
    uint32_t crc = 0;
    for (const RecordPart& part : touched.parts) {
      const auto index = static_cast<size_t>(part.index);
      crc = crc32_combine(crc, part.is_gap ? gap_crcs_[index] : pieces_[index].crc, part.nbytes);
    }
    if (crc == touched.record.crc) {
      if (records_ != nullptr) records_->set_checked(at.first, touched.record);
      continue;
    }
    const Piece& piece = pieces_[static_cast<size_t>(touched.pieces.front())];
    const ByteRange& range = touched.record.range;
    return corruption("cannot read ", describe(tensor(piece.request).slice),
                      ": its checksum does not match, which is that of bytes [", range.begin, ", ",
                      range.end, ") of the file");
  }
  return ok_status();
}

// Verifies raw slices without block checksums by the CRCs inside their torch.save archives.
Status LoadBatch::verify_bytes() const {
  for (const int64_t i : byte_indices_) {
    if (file_of(bytes_[static_cast<size_t>(i)]).sums != nullptr) continue;
    const LoadedBytes& loaded = result_.bytes[static_cast<size_t>(i)];
    const Bytes raw(loaded.data.get(), static_cast<size_t>(loaded.nbytes));
    const Status status = verify_archive(raw, slices_are_archives_);
    if (!status.ok()) return with_slice(status, bytes_[static_cast<size_t>(i)]);
  }
  return ok_status();
}

}  // namespace torch_ckpt
