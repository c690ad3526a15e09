#include "engine/load/load_job.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "engine/read_stream.h"

namespace torch_ckpt {
namespace {

// Bounds the number of open files.
constexpr size_t kMaxOpenFiles = 128;

// Bounds the memory for scales, unless those of one file that ranks exchange are longer, or those
// of one request for a temporary.
constexpr int64_t kMaxScaleNbytes = int64_t{16} << 20;

}  // namespace

struct LoadJob::State {
  FileSystem& fs;
  const std::string directory;
  const LoadOptions options;
  const std::unique_ptr<IndexLookup> index;  // Null if the checkpoint has none.
  std::unique_ptr<ReadStream> stream;
  std::map<std::string, OpenFile> files = {};  // Open files by name, at most kMaxOpenFiles.
  std::atomic<int64_t> loaded_nbytes = 0;

  // Frees files and buffers after an error, because a Python traceback may extend the life of the
  // job.
  Status release_on_error(Status status) {
    if (status.ok()) return status;
    files.clear();
    stream->release();
    return status;
  }

  // Returns the open file of a slice. The file stays open until `files` is full.
  Result<const OpenFile*> open(const StoredSlice& slice) {
    const auto known = files.find(slice.file);
    if (known != files.end()) return &known->second;
    ASSIGN_OR_RETURN(OpenFile file, open_new(slice));
    return &files.emplace(slice.file, std::move(file)).first->second;
  }

  // Opens the files of these slices, at most kMaxOpenFiles. Closes others if there are too many.
  Status open_all(const std::vector<StoredSlice>& slices) {
    std::set<std::string_view> wanted;
    for (const StoredSlice& slice : slices) wanted.insert(slice.file);
    const auto more = std::ranges::count_if(
        slices, [&](const auto& slice) { return !files.contains(slice.file); });
    if (files.size() + static_cast<size_t>(more) > kMaxOpenFiles) {
      std::erase_if(files, [&](const auto& file) { return !wanted.contains(file.first); });
    }
    for (const StoredSlice& slice : slices) RETURN_IF_ERROR(open(slice).status());
    return ok_status();
  }

  // Adds ranges of open files to the byte ranges that a load wants.
  void add_wanted(const std::vector<WantedRange>& ranges, WantedBytes* wanted) const {
    std::map<const File*, std::string_view> names;
    for (const auto& [name, file] : files) names.emplace(file.file.get(), name);
    for (const WantedRange& want : ranges) {
      const ByteRange range = checkable_range(want);
      wanted->add(names[want.file], range);
      if (wanted->is_cached()) {
        wanted->set_cached(want.file->is_resident(range.begin, range.nbytes()));
      }
    }
  }

  Result<OpenFile> open_new(const StoredSlice& slice) const {
    if (!is_inside_directory(slice.file)) {
      return corruption("cannot read ", describe(slice), ": the file is outside the checkpoint");
    }
    const std::string path = directory + "/" + slice.file;
    std::unique_ptr<const FileSums> sums;
    if (index != nullptr) {
      ASSIGN_OR_RETURN(sums, index->sums(slice));
    }
    if (options.reachable && !options.reachable->contains(slice.file)) {
      if (!sums || !index->has_slices()) {
        return Status(StatusCode::kNotFound,
                      str_cat("cannot read ", describe(slice), ": this rank cannot reach ", path,
                              ", and no index describes it"));
      }
      auto away = std::make_unique<AwayFile>(path, sums->file_nbytes);
      const AwayFile* const file = away.get();
      const int64_t nbytes = sums->file_nbytes;
      if (!options.verify || !index->has_sums()) sums.reset();
      return OpenFile{std::move(away), nbytes, std::move(sums), file};
    }
    auto file = sums ? fs.open_known(path, sums->file_nbytes, options.caching)
                     : fs.open(path, OpenMode::kRead, options.caching);
    if (!file.ok()) return with_slice(file.status(), slice);
    ASSIGN_OR_RETURN(const int64_t nbytes, (*file)->size());
    OpenFile open{std::move(*file), nbytes};
    if (!sums) return open;
    if (sums->file_nbytes != nbytes) {
      return corruption("cannot read ", describe(slice), ": the file is ", nbytes,
                        " bytes long, and the index states ", sums->file_nbytes);
    }
    if (options.verify && index->has_sums()) open.sums = std::move(sums);
    return open;
  }
};

LoadJob::LoadJob(std::unique_ptr<State> state) : state_(std::move(state)) {}
LoadJob::~LoadJob() = default;

Result<std::unique_ptr<LoadJob>> LoadJob::make(FileSystem& fs, std::string directory,
                                               const LoadOptions& options,
                                               std::shared_ptr<const StoredIndex> index) {
  ASSIGN_OR_RETURN(auto stream, ReadStream::make(fs, options.buffer_nbytes, options.block_nbytes,
                                                 options.threads));
  std::unique_ptr<IndexLookup> lookup;
  if (index != nullptr) {
    const int64_t grain = index->block_nbytes();
    if (grain % kReadAlignment != 0 || options.block_nbytes < 4 * grain) {
      return invalid_argument("cannot check blocks of ", grain, " bytes in buffers of ",
                              options.block_nbytes);
    }
    lookup = std::make_unique<IndexLookup>(std::move(index));
  }
  std::unique_ptr<State> state(
      new State{fs, std::move(directory), options, std::move(lookup), std::move(stream)});
  return std::unique_ptr<LoadJob>(new LoadJob(std::move(state)));
}

Status LoadJob::check(std::span<const StoredSlice> slices) {
  std::map<std::string, int64_t> file_nbytes;
  for (const StoredSlice& slice : slices) {
    auto known = file_nbytes.find(slice.file);
    if (known == file_nbytes.end()) {
      if (state_->files.size() >= kMaxOpenFiles) state_->files.clear();
      const Result<const OpenFile*> file = state_->open(slice);
      RETURN_IF_ERROR(state_->release_on_error(file.status()));
      known = file_nbytes.emplace(slice.file, (*file)->nbytes).first;
    }
    RETURN_IF_ERROR(state_->release_on_error(check_extent(slice, known->second)));
  }
  return ok_status();
}

Result<WantedBytes> LoadJob::wanted(std::span<const TensorRequest> tensors,
                                    std::span<const StoredSlice> bytes) {
  WantedBytes out;
  out.set_cached(true);  // Until a range is found that is not.
  LoadResult result;
  RETURN_IF_ERROR(
      state_->release_on_error(run_batches(tensors, bytes, {}, nullptr, false, &out, &result)));
  return out;
}

Result<std::vector<Outcome>> LoadJob::outcomes(std::span<const TensorRequest> tensors) {
  WantedBytes unused;
  LoadResult result;
  RETURN_IF_ERROR(
      state_->release_on_error(run_batches(tensors, {}, {}, nullptr, false, &unused, &result)));
  return std::move(result.outcomes);
}

Result<LoadResult> LoadJob::run(std::span<const TensorRequest> tensors,
                                std::span<const StoredSlice> bytes, const HandOver& hand_over,
                                ExchangeStream* exchange, bool slices_are_archives) {
  std::vector<TensorRequest> cut;
  if (exchange == nullptr && state_->options.quantized != nullptr) {
    auto made = cut_by_scales(tensors);
    RETURN_IF_ERROR(state_->release_on_error(made.status()));
    cut = std::move(*made);
  }
  LoadResult result;
  RETURN_IF_ERROR(
      state_->release_on_error(run_batches(cut.empty() ? tensors : cut, bytes, hand_over, exchange,
                                           slices_are_archives, nullptr, &result)));
  result.outcomes.resize(tensors.size());
  return result;
}

void LoadJob::cancel() { state_->stream->cancel(); }

int64_t LoadJob::requests() const { return state_->stream->requests(); }

double LoadJob::waited_s() const { return state_->stream->waited_s(); }

int64_t LoadJob::loaded_nbytes() const {
  return state_->loaded_nbytes.load(std::memory_order_relaxed);
}

DType LoadJob::given(const std::string& fqn, DType stored, std::optional<DType> target) const {
  const QuantizedTensors* quantized = state_->options.quantized.get();
  if (quantized == nullptr) return stored;
  const auto found = quantized->find(fqn);
  return found == quantized->end() ? stored : found->second.given(target);
}

// Returns the requests that are dequantised, by their number.
Result<std::map<int64_t, Dequantization>> LoadJob::dequantizations(
    std::span<const TensorRequest> tensors) const {
  std::map<int64_t, Dequantization> out;
  const QuantizedTensors* quantized = state_->options.quantized.get();
  if (quantized == nullptr) return out;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [slice, box, live, stored] = tensors[i];
    const auto found = quantized->find(slice.name);
    if (found == quantized->end() || live.dtype == found->second.dtype) continue;
    ASSIGN_OR_RETURN(Dequantization made,
                     Dequantization::make(found->second, box, live.dtype, slice.name));
    out.emplace(static_cast<int64_t>(i), std::move(made));
  }
  return out;
}

// Cuts requests until the scales of each are within the bound. The first part of a request has its
// number, the others follow all requests.
Result<std::vector<TensorRequest>> LoadJob::cut_by_scales(
    std::span<const TensorRequest> tensors) const {
  std::vector<TensorRequest> out(tensors.begin(), tensors.end());
  for (size_t i = 0; i < out.size(); ++i) {
    const auto found = state_->options.quantized->find(out[i].slice.name);
    if (found == state_->options.quantized->end()) continue;
    const QuantizedTensor& facts = found->second;
    if (out[i].live.data == nullptr || out[i].live.dtype == facts.dtype ||
        out[i].live.sizes != out[i].box.sizes) {
      continue;
    }
    std::vector<size_t> dims(out[i].box.sizes.size());  // As stored.
    std::iota(dims.begin(), dims.end(), size_t{0});
    if (facts.is_transposed && dims.size() >= 2) std::swap(*dims.rbegin(), *(dims.rbegin() + 1));
    for (;;) {
      TensorRequest& whole = out[i];
      ASSIGN_OR_RETURN(const Dequantization made,
                       Dequantization::make(facts, whole.box, whole.live.dtype, whole.slice.name));
      const auto dim = std::ranges::find_if(dims, [&](size_t d) { return whole.box.sizes[d] > 1; });
      if (made.scale_nbytes() <= kMaxScaleNbytes || dim == dims.end()) break;
      TensorRequest rest = whole;
      const int64_t half = whole.box.sizes[*dim] / 2;
      rest.box.offsets[*dim] += half;
      rest.live.data += half * rest.live.strides[*dim];
      for (Dims* sizes : {&rest.box.sizes, &rest.live.sizes}) (*sizes)[*dim] -= half;
      for (Dims* sizes : {&whole.box.sizes, &whole.live.sizes}) (*sizes)[*dim] = half;
      out.push_back(std::move(rest));
    }
  }
  return out;
}

// Reads the scales of the requests of a batch. Requests that need the same ones share their reads.
Status LoadJob::read_scales(std::span<const TensorRequest> tensors,
                            const std::vector<int64_t>& batch,
                            std::map<int64_t, Dequantization>& dequantized) {
  std::vector<TensorRequest> requests;
  for (const int64_t i : batch) {
    const auto found = dequantized.find(i);
    if (found == dequantized.end() || found->second.scale_nbytes() == 0) continue;
    Dequantization& dequantization = found->second;
    const QuantizedTensor& facts = dequantization.tensor();
    dequantization.scales().resize(static_cast<size_t>(dequantization.scale_nbytes()));
    LiveTensor live{.name = tensors[static_cast<size_t>(i)].slice.name,
                    .dtype = facts.scale_dtype,
                    .sizes = dequantization.scale_box().sizes,
                    .strides = contiguous_strides(dequantization.scale_box().sizes),
                    .data = dequantization.scales().data()};
    for (int64_t& stride : live.strides) stride *= itemsize(live.dtype);
    StoredTensor stored;
    stored.dtype = facts.scale_dtype;
    stored.sizes = dequantization.scale_sizes();
    stored.strides = contiguous_strides(stored.sizes);
    stored.payload_nbytes = facts.scales.nbytes;
    requests.push_back(
        {facts.scales, dequantization.scale_box(), std::move(live), std::move(stored)});
  }
  if (requests.empty()) return ok_status();
  LoadResult result;
  return run_batches(requests, {}, {}, nullptr, false, nullptr, &result);
}

// Runs the requests in batches of at most kMaxOpenFiles files. If `only_wanted` is given, adds the
// byte ranges to it instead of reading them.
Status LoadJob::run_batches(std::span<const TensorRequest> tensors,
                            std::span<const StoredSlice> bytes, const HandOver& hand_over,
                            ExchangeStream* exchange, bool slices_are_archives,
                            WantedBytes* only_wanted, LoadResult* result) {
  struct FileRequests {
    std::vector<int64_t> tensors;
    std::vector<int64_t> bytes;
    std::vector<ExchangePiece> pieces;
    StoredSlice any;  // One slice of the file, for messages.
  };
  std::map<std::string, FileRequests> by_file;
  for (size_t i = 0; i < tensors.size(); ++i) {
    FileRequests& requests = by_file[tensors[i].slice.file];
    requests.tensors.push_back(static_cast<int64_t>(i));
    requests.any = tensors[i].slice;
    if (tensors[i].box.sizes != tensors[i].live.sizes) {
      return mismatch("a destination of sizes ", to_string(tensors[i].live.sizes), " is not for ",
                      to_string(tensors[i].box.sizes), " elements of ", describe(tensors[i].slice));
    }
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    FileRequests& requests = by_file[bytes[i].file];
    requests.bytes.push_back(static_cast<int64_t>(i));
    requests.any = bytes[i];
  }
  if (exchange != nullptr) {
    for (const ExchangePiece& piece : exchange->pieces()) {
      const std::string& name = exchange->files()[static_cast<size_t>(piece.file)];
      FileRequests& requests = by_file[name];
      requests.pieces.push_back(piece);
      if (requests.any.file.empty())
        requests.any = {name, piece.range.begin, piece.range.nbytes(), ""};
    }
  }

  result->outcomes.assign(tensors.size(), Outcome::kLoaded);
  result->bytes.resize(bytes.size());
  ASSIGN_OR_RETURN(auto dequantized, dequantizations(tensors));
  const auto scale_nbytes = [&](int64_t request) {
    const auto found = dequantized.find(request);
    return found == dequantized.end() ? 0 : found->second.scale_nbytes();
  };
  for (auto next = by_file.begin(); next != by_file.end();) {
    FileRequests all;
    std::vector<StoredSlice> slices;  // One of each file.
    int64_t nbytes = 0;               // Bytes of scales.
    for (; next != by_file.end() && slices.size() < kMaxOpenFiles; ++next) {
      const FileRequests& requests = next->second;
      int64_t more_nbytes = 0;
      for (const int64_t i : requests.tensors) more_nbytes += scale_nbytes(i);
      if (!slices.empty() && nbytes + more_nbytes > kMaxScaleNbytes) break;
      nbytes += more_nbytes;
      slices.push_back(requests.any);
      all.tensors.insert(all.tensors.end(), requests.tensors.begin(), requests.tensors.end());
      all.bytes.insert(all.bytes.end(), requests.bytes.begin(), requests.bytes.end());
      all.pieces.insert(all.pieces.end(), requests.pieces.begin(), requests.pieces.end());
    }
    // An exchange runs all pieces of a file at once.
    const bool at_once = exchange != nullptr || only_wanted != nullptr;
    auto begin = all.tensors.begin();
    do {
      std::vector<int64_t> group;
      for (nbytes = 0; begin != all.tensors.end(); ++begin) {
        nbytes += scale_nbytes(*begin);
        if (!at_once && !group.empty() && nbytes > kMaxScaleNbytes) break;
        group.push_back(*begin);
      }
      if (only_wanted == nullptr) RETURN_IF_ERROR(read_scales(tensors, group, dequantized));
      RETURN_IF_ERROR(state_->open_all(slices));
      IndexLookup* index = state_->index.get();
      const bool indexed = index != nullptr && index->has_slices();
      LoadBatch batch({*state_->stream, state_->files, indexed ? index : nullptr,
                       state_->options.records.get(), state_->options.quantized.get(), dequantized,
                       state_->options.verify, slices_are_archives, tensors, bytes, hand_over,
                       *result, state_->loaded_nbytes});
      RETURN_IF_ERROR(batch.plan(group, std::exchange(all.bytes, {})));
      if (only_wanted != nullptr) {
        state_->add_wanted(batch.wanted(), only_wanted);
      } else {
        RETURN_IF_ERROR(exchange == nullptr ? batch.run() : batch.run(*exchange, all.pieces));
      }
      for (const int64_t i : group) dequantized.erase(i);
    } while (begin != all.tensors.end());
  }
  return ok_status();
}

}  // namespace torch_ckpt
