#include "engine/load/load_job.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "engine/read_stream.h"

namespace torch_ckpt {
namespace {

// Bounds the number of open files.
constexpr size_t kMaxOpenFiles = 128;

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
  LoadResult result;
  RETURN_IF_ERROR(state_->release_on_error(
      run_batches(tensors, bytes, hand_over, exchange, slices_are_archives, nullptr, &result)));
  return result;
}

void LoadJob::cancel() { state_->stream->cancel(); }

int64_t LoadJob::requests() const { return state_->stream->requests(); }

double LoadJob::waited_s() const { return state_->stream->waited_s(); }

int64_t LoadJob::loaded_nbytes() const {
  return state_->loaded_nbytes.load(std::memory_order_relaxed);
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
  for (auto next = by_file.begin(); next != by_file.end();) {
    const auto end = std::next(
        next, std::min<ptrdiff_t>(std::distance(next, by_file.end()), ptrdiff_t{kMaxOpenFiles}));
    std::map<std::string, OpenFile>& files = state_->files;
    const auto is_in_batch = [&](const std::string& name) {
      return by_file.contains(name) && name >= next->first &&
             (end == by_file.end() || name < end->first);
    };
    const auto more =
        std::count_if(next, end, [&](const auto& wanted) { return !files.contains(wanted.first); });
    if (files.size() + static_cast<size_t>(more) > kMaxOpenFiles) {
      std::erase_if(files, [&](const auto& file) { return !is_in_batch(file.first); });
    }
    FileRequests all;
    for (; next != end; ++next) {
      const auto& [name, requests] = *next;
      RETURN_IF_ERROR(state_->open(requests.any).status());
      all.tensors.insert(all.tensors.end(), requests.tensors.begin(), requests.tensors.end());
      all.bytes.insert(all.bytes.end(), requests.bytes.begin(), requests.bytes.end());
      all.pieces.insert(all.pieces.end(), requests.pieces.begin(), requests.pieces.end());
    }
    IndexLookup* index = state_->index.get();
    const bool indexed = index != nullptr && index->has_slices();
    LoadBatch batch({*state_->stream, files, indexed ? index : nullptr,
                     state_->options.records.get(), state_->options.verify, slices_are_archives,
                     tensors, bytes, hand_over, *result, state_->loaded_nbytes});
    RETURN_IF_ERROR(batch.plan(all.tensors, all.bytes));
    if (only_wanted != nullptr) {
      std::map<const File*, std::string_view> names;
      for (const auto& [name, file] : files) names.emplace(file.file.get(), name);
      for (const WantedRange& want : batch.wanted()) {
        const ByteRange range = checkable_range(want);
        only_wanted->add(names[want.file], range);
        if (only_wanted->is_cached()) {
          only_wanted->set_cached(want.file->is_resident(range.begin, range.nbytes()));
        }
      }
      continue;
    }
    RETURN_IF_ERROR(exchange == nullptr ? batch.run() : batch.run(*exchange, all.pieces));
  }
  return ok_status();
}

}  // namespace torch_ckpt
