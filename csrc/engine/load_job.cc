#include "engine/load_job.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <new>
#include <optional>
#include <utility>

#include "base/crc.h"
#include "engine/read_stream.h"
#include "format/zip_frame.h"
#include "geometry/overlap.h"

namespace torch_ckpt {
namespace {

// Slices up to this long are read whole, frame and all; of longer ones the frame is read first.
constexpr int64_t kWholeSliceNbytes = int64_t{128} << 10;

// Heads are read in this length first, and again at up to kMaxHeadNbytes where that was too little.
constexpr int64_t kFirstHeadNbytes = 4096;
constexpr int64_t kMaxHeadNbytes = int64_t{1} << 20;

// Rows of a stored tensor with a gap up to this between them are read as one range.
constexpr int64_t kMaxRowGap = int64_t{32} << 10;

// How many files are open, and how many frames in memory, at a time.
constexpr size_t kMaxOpenFiles = 128;
constexpr size_t kFramesAtATime = 1024;

// A name from metadata stays inside the checkpoint's directory.
bool is_inside_directory(const std::string& path) {
  if (path.empty() || path.front() == '/') return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    if (path.substr(begin, end - begin) == "..") return false;
    begin = end + 1;
  }
  return true;
}

std::string describe(const StoredSlice& slice) {
  return str_cat("'", slice.name, "' (", slice.nbytes, " bytes at ", slice.offset, " of ",
                 slice.file, ")");
}

Status with_slice(const Status& status, const StoredSlice& slice) {
  return Status(status.code(), str_cat("cannot read ", describe(slice), ": ", status.message()),
                status.error_number());
}

Dims in_bytes(const std::vector<int64_t>& strides, int64_t itemsize) {
  Dims out(strides.begin(), strides.end());
  for (int64_t& stride : out) stride *= itemsize;
  return out;
}

// Whether the copy is one run of bytes on both sides.
bool is_one_run(const StridedCopy& copy) {
  const StridedCopy simple = simplified(copy);
  return simple.sizes.empty() ||
         (simple.sizes.size() == 1 && simple.src_strides[0] == copy.itemsize &&
          simple.dst_strides[0] == copy.itemsize);
}

struct OpenFile {
  std::unique_ptr<File> file;
  int64_t nbytes = 0;
};

// A frame that is being read.
struct PendingFrame {
  const StoredSlice* slice;
  File* file;
  int64_t head_nbytes = kFirstHeadNbytes;
  std::vector<std::byte> head;
  std::vector<std::byte> tail;
};

// One cut of a large tensor request.
struct Piece {
  int64_t request;
  StridedCopy copy;  // Source offsets count from the start of the file.
  bool one_run;
  uint32_t crc = 0;
};

// The pieces [first, last) are the whole payload of a slice, in order.
struct WholePayload {
  int64_t first;
  int64_t last;
  uint32_t crc;
};

// One run over files that are all open.
class Batch {
 public:
  Batch(ReadStream& stream, const std::map<std::string, OpenFile>& files, bool verify,
        std::span<const TensorRequest> tensors, std::span<const StoredSlice> bytes,
        LoadResult& result)
      : stream_(stream),
        files_(files),
        verify_(verify),
        tensors_(tensors),
        bytes_(bytes),
        result_(result),
        whole_slice_nbytes_(std::min(kWholeSliceNbytes, stream.max_range_nbytes())),
        max_head_nbytes_(std::min(kMaxHeadNbytes, stream.max_range_nbytes())) {}

  // `tensor_indices` and `byte_indices` are the requests of this batch.
  Status run(const std::vector<int64_t>& tensor_indices, const std::vector<int64_t>& byte_indices);

 private:
  using FrameKey = std::pair<std::string, int64_t>;

  Status check_extent(const StoredSlice& slice) const;
  Status read_frames(const std::vector<int64_t>& tensor_indices);
  Status read_some_frames(std::vector<PendingFrame> pending);
  Status plan_tensor(int64_t request);
  Status plan_bytes(int64_t request);
  Result<bool> accepts(int64_t request, const StoredTensor& stored);
  Status consume(int64_t index, Bytes bytes);
  Status consume_piece(Piece& piece, Bytes bytes) const;
  Status consume_whole_slice(int64_t request, Bytes bytes);
  Status verify_payloads() const;

  File* file_of(const StoredSlice& slice) const {
    return files_.find(slice.file)->second.file.get();
  }
  const TensorRequest& tensor(int64_t request) const {
    return tensors_[static_cast<size_t>(request)];
  }
  void leave_to_torch(int64_t request) {
    result_.outcomes[static_cast<size_t>(request)] = Outcome::kNeedsTorch;
  }

  ReadStream& stream_;
  const std::map<std::string, OpenFile>& files_;
  const bool verify_;
  std::span<const TensorRequest> tensors_;
  std::span<const StoredSlice> bytes_;
  LoadResult& result_;
  const int64_t whole_slice_nbytes_;
  const int64_t max_head_nbytes_;

  std::map<FrameKey, std::optional<StoredTensor>> frames_;  // nullopt: torch's to read.

  // What is wanted, in the order of `wanted_`: pieces, then whole slices, then raw bytes.
  std::vector<WantedRange> wanted_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> whole_slices_;  // Requests.
  std::vector<WholePayload> whole_payloads_;
};

Status Batch::check_extent(const StoredSlice& slice) const {
  const int64_t file_nbytes = files_.find(slice.file)->second.nbytes;
  if (range_within(slice.offset, slice.nbytes, file_nbytes)) return ok_status();
  return corruption("cannot read ", describe(slice), ": the file is ", file_nbytes, " bytes long");
}

Status Batch::run(const std::vector<int64_t>& tensor_indices,
                  const std::vector<int64_t>& byte_indices) {
  for (const int64_t i : tensor_indices) RETURN_IF_ERROR(check_extent(tensor(i).slice));
  for (const int64_t i : byte_indices) {
    RETURN_IF_ERROR(check_extent(bytes_[static_cast<size_t>(i)]));
  }
  RETURN_IF_ERROR(read_frames(tensor_indices));

  for (const int64_t i : tensor_indices) {
    if (tensor(i).slice.nbytes > whole_slice_nbytes_) RETURN_IF_ERROR(plan_tensor(i));
  }
  for (const int64_t i : tensor_indices) {
    const StoredSlice& slice = tensor(i).slice;
    if (slice.nbytes > whole_slice_nbytes_) continue;
    whole_slices_.push_back(i);
    wanted_.push_back({file_of(slice), {slice.offset, slice.offset + slice.nbytes}, nullptr});
  }
  for (const int64_t i : byte_indices) RETURN_IF_ERROR(plan_bytes(i));

  RETURN_IF_ERROR(
      stream_.run(wanted_, [this](int64_t index, Bytes bytes) { return consume(index, bytes); }));
  return verify_payloads();
}

// Reads the frame of every large slice, once for all requests of it.
Status Batch::read_frames(const std::vector<int64_t>& tensor_indices) {
  std::vector<PendingFrame> pending;
  for (const int64_t i : tensor_indices) {
    const StoredSlice& slice = tensor(i).slice;
    if (slice.nbytes <= whole_slice_nbytes_) continue;
    if (!frames_.emplace(FrameKey(slice.file, slice.offset), std::nullopt).second) continue;
    pending.push_back({.slice = &slice, .file = file_of(slice), .head = {}, .tail = {}});
    if (pending.size() == kFramesAtATime) {
      RETURN_IF_ERROR(read_some_frames(std::move(pending)));
      pending.clear();
    }
  }
  return read_some_frames(std::move(pending));
}

Status Batch::read_some_frames(std::vector<PendingFrame> pending) {
  while (!pending.empty()) {
    std::vector<WantedRange> wanted;
    for (const PendingFrame& frame : pending) {
      const int64_t begin = frame.slice->offset;
      const int64_t end = begin + frame.slice->nbytes;
      wanted.push_back({frame.file, {begin, begin + frame.head_nbytes}, nullptr});
      wanted.push_back({frame.file, {end - kFrameTailNbytes, end}, nullptr});
    }
    RETURN_IF_ERROR(stream_.run(wanted, [&](int64_t index, Bytes bytes) {
      PendingFrame& frame = pending[static_cast<size_t>(index / 2)];
      (index % 2 == 0 ? frame.head : frame.tail).assign(bytes.begin(), bytes.end());
      return ok_status();
    }));

    std::vector<PendingFrame> again;
    for (PendingFrame& frame : pending) {
      const int64_t nbytes = frame.slice->nbytes;
      const Result<int64_t> needed = frame_head_nbytes(frame.tail, nbytes);
      if (needed.ok() && *needed > frame.head_nbytes && *needed <= max_head_nbytes_) {
        frame.head_nbytes = *needed;
        again.push_back(std::move(frame));
        continue;
      }
      Result<StoredTensor> stored = needed.ok() ? parse_frame(frame.head, frame.tail, nbytes)
                                                : Result<StoredTensor>(needed.status());
      if (stored.ok()) {
        frames_[FrameKey(frame.slice->file, frame.slice->offset)] = std::move(*stored);
      } else if (stored.status().code() != StatusCode::kUnsupported) {
        return with_slice(stored.status(), *frame.slice);
      }
    }
    pending = std::move(again);
  }
  return ok_status();
}

// Whether this engine copies the stored tensor itself. False leaves the request to torch.
Result<bool> Batch::accepts(int64_t request, const StoredTensor& stored) {
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

Status Batch::plan_tensor(int64_t request) {
  const TensorRequest& wanted = tensor(request);
  const auto& frame = frames_.find(FrameKey(wanted.slice.file, wanted.slice.offset))->second;
  if (!frame.has_value()) {
    leave_to_torch(request);
    return ok_status();
  }
  const StoredTensor& stored = *frame;
  ASSIGN_OR_RETURN(const bool accepted, accepts(request, stored));
  if (!accepted) return ok_status();

  const int64_t size = itemsize(stored.dtype);
  const int64_t payload = wanted.slice.offset + stored.payload_offset;
  const StridedCopy copy = copy_of_box(wanted.box, size, payload + stored.storage_offset * size,
                                       in_bytes(stored.strides, size), wanted.live.strides);

  const auto first = static_cast<int64_t>(pieces_.size());
  int64_t tiled_until = payload;  // How far the pieces cover the payload without a gap.
  for (StridedCopy& part : split_by_source(copy, stream_.max_range_nbytes(), kMaxRowGap)) {
    const ByteRange range = source_range(part);
    if (range.begin == tiled_until) tiled_until = range.end;
    const bool one_run = is_one_run(part);
    std::byte* destination = one_run ? wanted.live.data + part.dst_offset : nullptr;
    wanted_.push_back({file_of(wanted.slice), range, destination});
    pieces_.push_back({request, std::move(part), one_run});
  }
  const auto last = static_cast<int64_t>(pieces_.size());
  const bool whole = tiled_until == payload + stored.payload_nbytes;
  // torch.save leaves 0 where it was told not to compute checksums.
  if (verify_ && whole && stored.payload_crc != 0) {
    whole_payloads_.push_back({first, last, stored.payload_crc});
  }
  return ok_status();
}

Status Batch::plan_bytes(int64_t request) {
  const StoredSlice& slice = bytes_[static_cast<size_t>(request)];
  LoadedBytes& loaded = result_.bytes[static_cast<size_t>(request)];
  loaded.data.reset(new (std::nothrow) std::byte[static_cast<size_t>(slice.nbytes)]);
  if (loaded.data == nullptr) {
    return with_slice(errno_status(ENOMEM, "cannot allocate its bytes"), slice);
  }
  loaded.nbytes = slice.nbytes;
  const int64_t most = stream_.max_range_nbytes();
  for (int64_t begin = 0; begin < slice.nbytes; begin += most) {
    const int64_t end = std::min(begin + most, slice.nbytes);
    wanted_.push_back(
        {file_of(slice), {slice.offset + begin, slice.offset + end}, loaded.data.get() + begin});
  }
  return ok_status();
}

Status Batch::consume(int64_t index, Bytes bytes) {
  if (index < static_cast<int64_t>(pieces_.size())) {
    return consume_piece(pieces_[static_cast<size_t>(index)], bytes);
  }
  const int64_t slice_index = index - static_cast<int64_t>(pieces_.size());
  if (slice_index < static_cast<int64_t>(whole_slices_.size())) {
    return consume_whole_slice(whole_slices_[static_cast<size_t>(slice_index)], bytes);
  }
  std::byte* destination = wanted_[static_cast<size_t>(index)].destination;
  if (bytes.data() != destination) std::copy(bytes.begin(), bytes.end(), destination);
  return ok_status();
}

Status Batch::consume_piece(Piece& piece, Bytes bytes) const {
  const LiveTensor& live = tensor(piece.request).live;
  std::byte* destination = live.data + piece.copy.dst_offset;
  if (piece.one_run && bytes.data() != destination) {
    piece.crc = live.device->copy_and_checksum(bytes, {destination, bytes.size()}, 0);
    return ok_status();
  }
  if (!piece.one_run) {
    StridedCopy copy = piece.copy;
    copy.src_offset = 0;  // The first source byte is the first of `bytes`.
    live.device->copy(copy, bytes.data(), live.data);
  }
  if (verify_) piece.crc = crc32(0, bytes);
  return ok_status();
}

Status Batch::consume_whole_slice(int64_t request, Bytes bytes) {
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
  wanted.live.device->copy(copy_of_box(wanted.box, size, stored.storage_offset * size,
                                       in_bytes(stored.strides, size), wanted.live.strides),
                           payload.data(), wanted.live.data);
  return ok_status();
}

Status Batch::verify_payloads() const {
  for (const WholePayload& whole : whole_payloads_) {
    uint32_t crc = 0;
    for (int64_t i = whole.first; i < whole.last; ++i) {
      const Piece& piece = pieces_[static_cast<size_t>(i)];
      crc = crc32_combine(crc, piece.crc, source_range(piece.copy).nbytes());
    }
    if (crc == whole.crc) continue;
    const Piece& piece = pieces_[static_cast<size_t>(whole.first)];
    return corruption("cannot read ", describe(tensor(piece.request).slice),
                      ": its checksum does not match");
  }
  return ok_status();
}

}  // namespace

struct LoadJob::State {
  FileSystem& fs;
  const std::string directory;
  const LoadOptions options;
  std::unique_ptr<ReadStream> stream;

  Result<OpenFile> open(const StoredSlice& slice) const {
    if (!is_inside_directory(slice.file)) {
      return corruption("cannot read ", describe(slice), ": the file is outside the checkpoint");
    }
    auto file = fs.open(directory + "/" + slice.file, OpenMode::kRead, Caching::kDirect);
    if (!file.ok()) return with_slice(file.status(), slice);
    ASSIGN_OR_RETURN(const int64_t nbytes, (*file)->size());
    return OpenFile{std::move(*file), nbytes};
  }
};

LoadJob::LoadJob(std::unique_ptr<State> state) : state_(std::move(state)) {}
LoadJob::~LoadJob() = default;

Result<std::unique_ptr<LoadJob>> LoadJob::make(FileSystem& fs, std::string directory,
                                               const LoadOptions& options) {
  ASSIGN_OR_RETURN(auto stream, ReadStream::make(fs, options.buffer_nbytes, options.block_nbytes,
                                                 options.threads));
  std::unique_ptr<State> state(new State{fs, std::move(directory), options, std::move(stream)});
  return std::unique_ptr<LoadJob>(new LoadJob(std::move(state)));
}

Result<LoadResult> LoadJob::run(std::span<const TensorRequest> tensors,
                                std::span<const StoredSlice> bytes) {
  struct Wanted {
    std::vector<int64_t> tensors;
    std::vector<int64_t> bytes;
    const StoredSlice* first;  // For messages.
  };
  std::map<std::string, Wanted> by_file;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Wanted& wanted = by_file[tensors[i].slice.file];
    wanted.tensors.push_back(static_cast<int64_t>(i));
    wanted.first = &tensors[i].slice;
    if (tensors[i].box.sizes != tensors[i].live.sizes) {
      return mismatch("a destination of sizes ", to_string(tensors[i].live.sizes), " is not for ",
                      to_string(tensors[i].box.sizes), " elements of ", describe(tensors[i].slice));
    }
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    Wanted& wanted = by_file[bytes[i].file];
    wanted.bytes.push_back(static_cast<int64_t>(i));
    wanted.first = &bytes[i];
  }

  LoadResult result;
  result.outcomes.assign(tensors.size(), Outcome::kLoaded);
  result.bytes.resize(bytes.size());
  for (auto next = by_file.begin(); next != by_file.end();) {
    std::map<std::string, OpenFile> files;
    std::vector<int64_t> tensor_indices;
    std::vector<int64_t> byte_indices;
    for (; next != by_file.end() && files.size() < kMaxOpenFiles; ++next) {
      const auto& [name, wanted] = *next;
      ASSIGN_OR_RETURN(OpenFile file, state_->open(*wanted.first));
      files.emplace(name, std::move(file));
      tensor_indices.insert(tensor_indices.end(), wanted.tensors.begin(), wanted.tensors.end());
      byte_indices.insert(byte_indices.end(), wanted.bytes.begin(), wanted.bytes.end());
    }
    Batch batch(*state_->stream, files, state_->options.verify, tensors, bytes, result);
    RETURN_IF_ERROR(batch.run(tensor_indices, byte_indices));
  }
  return result;
}

}  // namespace torch_ckpt
