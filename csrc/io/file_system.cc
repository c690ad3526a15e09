#include "io/file_system.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "io/storage_call.h"

namespace torch_ckpt {
namespace {

// A copy syncs after so many bytes. Otherwise the last sync would write all of a file at once, and
// whoever uses the disk at that moment would wait.
constexpr int64_t kSyncNbytes = int64_t{64} << 20;

Status run_one(IoQueue& queue, const IoRequest& request) {
  const bool is_sync = request.kind == IoRequest::Kind::kSync;
  const StorageCall call(is_sync ? "syncing" : "writing", request.file->path());
  queue.submit({&request, 1});
  const std::span<const IoDone> done = queue.wait();
  if (done.empty()) return internal_error("a queue lost a request on ", request.file->path());
  return done.front().status;
}

}  // namespace

std::string parent_directory(std::string_view path) {
  const auto without_trailing_slashes = [](std::string_view text) {
    while (text.size() > 1 && text.back() == '/') text.remove_suffix(1);
    return text;
  };
  path = without_trailing_slashes(path);
  const size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  return std::string(without_trailing_slashes(path.substr(0, std::max<size_t>(slash, 1))));
}

const Traits& FileSystem::traits() const {
  static const Traits traits;
  return traits;
}

Status FileSystem::link(const std::string& from, const std::string& to, bool) {
  return unsupported("cannot link ", from, " to ", to, ": this file system has no links");
}

Status FileSystem::exchange(const std::string& one, const std::string& other) {
  return errno_status(ENOSYS, str_cat("cannot exchange ", one, " and ", other));
}

Status FileSystem::remove_all(const std::string& path) {
  return errno_status(ENOSYS, str_cat("cannot remove ", path, " with its contents"));
}

Result<double> FileSystem::modified_s(const std::string& path) {
  return errno_status(ENOSYS, str_cat("cannot determine when ", path, " was written"));
}

Status FileSystem::put(const std::string& path, Bytes, OpenMode) {
  return errno_status(ENOSYS, str_cat("cannot write ", path, " at once"));
}

Result<std::string> FileSystem::version(const std::string& path) {
  return errno_status(ENOSYS, str_cat("cannot determine the version of ", path));
}

Status FileSystem::publish(const std::string& path, Bytes, const std::string&) {
  return errno_status(ENOSYS, str_cat("cannot publish ", path, " by a condition"));
}

Status write_file(FileSystem& fs, const std::string& path, Bytes bytes, bool sync, OpenMode mode) {
  if (!fs.traits().writes_at_offsets) return fs.put(path, bytes, mode);
  ASSIGN_OR_RETURN(const auto file, fs.open(path, mode, Caching::kBuffered));
  const auto queue = fs.make_queue(1);
  // IoRequest has one mutable memory field for both directions. A write only reads it.
  const MutableBytes memory(const_cast<std::byte*>(bytes.data()), bytes.size());
  IoRequest request{.kind = IoRequest::Kind::kWrite, .file = file.get(), .memory = memory};
  request.caching = Caching::kBuffered;
  RETURN_IF_ERROR(run_one(*queue, request));
  if (!sync) return ok_status();
  request.kind = IoRequest::Kind::kSync;
  return run_one(*queue, request);
}

Status copy_file(FileSystem& from, const std::string& source, FileSystem& to,
                 const std::string& target,
                 const std::function<Status(int64_t offset, Bytes piece)>& check,
                 int64_t piece_nbytes) {
  ASSIGN_OR_RETURN(const auto in, from.open(source, OpenMode::kRead, Caching::kBuffered));
  ASSIGN_OR_RETURN(const auto out, to.open(target, OpenMode::kCreate, Caching::kBuffered));
  ASSIGN_OR_RETURN(const int64_t nbytes, in->size());
  if (nbytes > 0) RETURN_IF_ERROR(out->preallocate(nbytes));
  const auto queue = to.make_queue(1);
  const auto sync = [&](int64_t end) {
    return run_one(*queue, {.kind = IoRequest::Kind::kSync, .file = out.get(), .offset = end});
  };
  std::vector<std::byte> piece(static_cast<size_t>(std::min(nbytes, piece_nbytes)));
  for (int64_t offset = 0; offset < nbytes; offset += ssize(piece)) {
    piece.resize(static_cast<size_t>(std::min(nbytes - offset, piece_nbytes)));
    RETURN_IF_ERROR(in->read(offset, piece));
    if (check) RETURN_IF_ERROR(check(offset, piece));
    RETURN_IF_ERROR(out->write(offset, piece));
    const bool is_due = (offset + ssize(piece)) % kSyncNbytes == 0;
    if (is_due && to.traits().writes_at_offsets) RETURN_IF_ERROR(sync(offset + ssize(piece)));
  }
  return sync(nbytes);
}

}  // namespace torch_ckpt
