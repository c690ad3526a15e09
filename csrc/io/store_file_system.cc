#include "io/store_file_system.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "io/storage_call.h"
#include "io/thread_queue.h"
#include "io/upload.h"

namespace torch_ckpt {
namespace {

// The first bytes of a file that is opened for small reads arrive with its length. Most metadata
// and indexes are shorter.
constexpr int64_t kStartNbytes = int64_t{1} << 20;

// A request costs about as much as the bytes that arrive meanwhile, but they also cost bandwidth.
constexpr int64_t kMaxGapNbytes = int64_t{256} << 10;

constexpr int kMaxAnswers = 8;  // To the question whether an object is what this process wrote.

// An object that is read, or a new one.
class StoreFile final : public File {
 public:
  // For an object that exists.
  StoreFile(ObjectStore& store, std::string path, ObjectStore::Found found)
      : store_(store), path_(std::move(path)), found_(std::move(found)) {}
  // For a new one.
  StoreFile(ObjectStore& store, std::string path)
      : store_(store), path_(std::move(path)), upload_(std::make_unique<Upload>(store, path_)) {}

  const std::string& path() const override { return path_; }
  Result<int64_t> size() const override { return found_.nbytes; }
  int64_t alignment() const override { return 1; }
  const std::string& fallback_reason() const override { return no_reason_; }
  bool is_resident(int64_t offset, int64_t nbytes) const override {
    return offset + nbytes <= ssize(found_.start);
  }

  Status read(int64_t offset, MutableBytes memory) override {
    const StorageCall call("reading", path_);
    return get(offset, memory, nullptr);
  }

  // Copies the bytes to `memory`, unless `received` is given.
  Status get(int64_t offset, MutableBytes memory, Window* received) {
    if (upload_) return errno_status(EBADF, failure("cannot read ", offset, memory));
    if (ssize(memory) > found_.nbytes - offset) {
      return corruption(failure("cannot read ", offset, memory), ": the file ends at ",
                        found_.nbytes);
    }
    if (memory.empty()) return ok_status();
    Window window;
    if (offset + ssize(memory) <= ssize(found_.start)) {
      window.bytes = slice(Bytes(found_.start), offset, ssize(memory));
    } else {
      ASSIGN_OR_RETURN(window, store_.get(path_, offset, ssize(memory)));
    }
    if (received != nullptr) {
      *received = std::move(window);
    } else {
      std::memcpy(memory.data(), window.bytes.data(), memory.size());
    }
    return ok_status();
  }

  Status write(int64_t offset, Bytes bytes) override {
    const StorageCall call("writing", path_);
    return write(offset, bytes, 1);
  }

  // One of `in_flight` writes at a time.
  Status write(int64_t offset, Bytes bytes, int in_flight) {
    if (!upload_) return errno_status(EBADF, failure("cannot write ", offset, bytes));
    return upload_->write(offset, bytes, in_flight);
  }

  Status preallocate(int64_t nbytes) override {
    if (!upload_) return errno_status(EBADF, str_cat("cannot preallocate ", path_));
    upload_->expect(nbytes);
    return ok_status();
  }

  int64_t part_nbytes() const override { return upload_ ? upload_->part_nbytes() : 0; }

  Status truncate(int64_t) override {
    return errno_status(EINVAL, str_cat("cannot truncate ", path_, ": it is a stream"));
  }

  Status finish(int64_t nbytes) {
    if (!upload_) return ok_status();  // The store has it.
    RETURN_IF_ERROR(upload_->finish(nbytes));
    found_.nbytes = nbytes;
    return ok_status();
  }

  void abandon() override {
    if (upload_) upload_->abandon();
  }

 private:
  std::string failure(const char* what, int64_t offset, Bytes bytes) const {
    return str_cat(what, bytes.size(), " bytes at ", offset, " of ", path_);
  }

  ObjectStore& store_;
  const std::string path_;
  ObjectStore::Found found_;
  const std::string no_reason_;
  const std::unique_ptr<Upload> upload_;  // Null for an object that exists.
};

Status carry_out(const IoRequest& request, int in_flight) {
  auto* file = dynamic_cast<StoreFile*>(request.file);
  if (file == nullptr) {
    return internal_error("a request names no file of the file system that made its queue");
  }
  if (!range_within(request.offset, ssize(request.memory), std::numeric_limits<int64_t>::max())) {
    return invalid_argument("cannot access ", request.memory.size(), " bytes at ", request.offset,
                            " of ", file->path(), ": no file has such a range");
  }
  switch (request.kind) {
    case IoRequest::Kind::kRead:
      return file->get(request.offset, request.memory, request.received);
    case IoRequest::Kind::kWrite:
      return file->write(request.offset, request.memory, in_flight);
    case IoRequest::Kind::kSync:
      return file->finish(request.offset);
  }
  return internal_error("a request of an unknown kind on ", file->path());
}

}  // namespace

const Traits& StoreFileSystem::traits() const {
  static const Traits traits = {.publishes_by_condition = true,
                                .writes_at_offsets = false,
                                .has_folders = false,
                                .request_nbytes = part_nbytes(0),
                                .max_gap_nbytes = kMaxGapNbytes,
                                .reads_in_place = false};
  return traits;
}

Result<std::unique_ptr<File>> StoreFileSystem::open(const std::string& path, OpenMode mode,
                                                    Caching caching) {
  if (mode == OpenMode::kUpdate) {
    return unsupported("cannot write at offsets of ", path, ": an object store writes whole files");
  }
  if (mode == OpenMode::kCreate) return std::unique_ptr<File>(new StoreFile(*store_, path));
  const StorageCall call("opening", path);
  auto found = store_->find(path, caching == Caching::kBuffered ? kStartNbytes : 0);
  if (found.status().code() == StatusCode::kNotFound && is_folder(path)) {
    return errno_status(EISDIR, str_cat("cannot open ", path));
  }
  if (!found.ok()) return found.status();
  return std::unique_ptr<File>(new StoreFile(*store_, path, *std::move(found)));
}

Result<std::unique_ptr<File>> StoreFileSystem::open_known(const std::string& path, int64_t nbytes,
                                                          Caching) {
  ObjectStore::Found known;
  known.nbytes = nbytes;
  return std::unique_ptr<File>(new StoreFile(*store_, path, std::move(known)));
}

bool StoreFileSystem::is_folder(const std::string& path) {
  const auto names = store_->list(path);
  return names.ok() && !names->empty();
}

Result<double> StoreFileSystem::modified_s(const std::string& path) {
  const StorageCall call("inspecting", path);
  ASSIGN_OR_RETURN(const auto found, store_->find(path, 0));
  return found.modified_s;
}

Status StoreFileSystem::create_directories(const std::string&) { return ok_status(); }
Status StoreFileSystem::sync_directory(const std::string&) { return ok_status(); }

Result<std::vector<std::string>> StoreFileSystem::list_directory(const std::string& path) {
  const StorageCall call("listing", path);
  ASSIGN_OR_RETURN(auto names, store_->list(path));
  std::sort(names.begin(), names.end());
  return names;
}

Status StoreFileSystem::rename(const std::string& from, const std::string& to) {
  const StorageCall call("renaming", from);
  const Status copied = store_->copy(from, to);
  if (copied.code() == StatusCode::kNotFound && is_folder(from)) {
    return errno_status(EOPNOTSUPP, str_cat("cannot rename the folder ", from));
  }
  RETURN_IF_ERROR(copied);
  return store_->remove(from);
}

Status StoreFileSystem::link(const std::string& from, const std::string& to, bool) {
  const StorageCall call("linking", from);
  if (!store_->copies())
    return unsupported("cannot link ", from, " to ", to, ": the store cannot copy");
  return store_->copy(from, to);
}

Status StoreFileSystem::remove(const std::string& path) {
  const StorageCall call("removing", path);
  return store_->remove(path);
}

Status StoreFileSystem::remove_all(const std::string& path) {
  const StorageCall call("removing", path);
  return store_->remove_all(path);
}

std::unique_ptr<IoQueue> StoreFileSystem::make_queue(int depth) {
  return make_thread_queue(depth, depth, {.name = "requests", .reason = ""}, carry_out);
}

Status StoreFileSystem::put(const std::string& path, Bytes bytes, OpenMode mode) {
  return put_if(path, bytes,
                {mode == OpenMode::kCreate ? Condition::Kind::kAbsent : Condition::Kind::kNone});
}

Result<std::string> StoreFileSystem::version(const std::string& path) {
  const StorageCall call("inspecting", path);
  auto found = store_->find(path, 0);
  if (found.status().code() == StatusCode::kNotFound) return std::string();
  if (!found.ok()) return found.status();
  return std::move(found->version);
}

Status StoreFileSystem::publish(const std::string& path, Bytes bytes, const std::string& version) {
  using Kind = Condition::Kind;
  return put_if(path, bytes, {version.empty() ? Kind::kAbsent : Kind::kVersion, version});
}

// A client repeats a request whose answer was lost. If the store had carried it out, the condition
// is false by then, and the object has these bytes.
Status StoreFileSystem::put_if(const std::string& path, Bytes bytes, const Condition& condition) {
  const StorageCall call("writing", path);
  Status status = store_->put(path, bytes, condition);
  if (status.code() == StatusCode::kNotFound && condition.kind == Condition::Kind::kVersion) {
    status = errno_status(EEXIST, str_cat("cannot replace ", path, ": it was removed meanwhile"));
  }
  if (status.error_number() != EEXIST) return status;
  const Result<bool> is_ours = has_bytes(path, bytes);
  if (!is_ours.ok()) {
    return Status(is_ours.status().code(),
                  str_cat("cannot determine whether this process has written ", path, ": ",
                          is_ours.status().message()),
                  is_ours.status().error_number());
  }
  return *is_ours ? ok_status() : status;
}

// Returns whether an object has these bytes. Others count only if two answers agree on them: the
// first may be damaged, and a save that takes its own commit for another one removes its files.
Result<bool> StoreFileSystem::has_bytes(const std::string& path, Bytes bytes) {
  std::vector<std::byte> before;
  for (int answer = 0; answer < kMaxAnswers; ++answer) {
    auto found = store_->find(path, ssize(bytes) + 1);
    if (found.status().code() == StatusCode::kNotFound) return false;
    if (!found.ok()) return found.status();
    if (std::ranges::equal(found->start, bytes)) return true;
    const bool is_whole = ssize(found->start) >= std::min(found->nbytes, ssize(bytes) + 1);
    if (is_whole && found->start == before) return false;
    before = std::move(found->start);
  }
  return errno_status(ETIMEDOUT, str_cat("cannot read ", path, ": answers of the store differ"));
}

}  // namespace torch_ckpt
