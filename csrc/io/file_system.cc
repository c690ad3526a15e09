#include "io/file_system.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

namespace torch_ckpt {
namespace {

Status run_one(IoQueue& queue, const IoRequest& request) {
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

Status FileSystem::exchange(const std::string& one, const std::string& other) {
  return errno_status(ENOSYS, str_cat("cannot exchange ", one, " and ", other));
}

Status FileSystem::put(const std::string& path, Bytes, OpenMode) {
  return errno_status(ENOSYS, str_cat("cannot write ", path, " at once"));
}

Result<std::string> FileSystem::version(const std::string& path) {
  return errno_status(ENOSYS, str_cat("cannot tell the version of ", path));
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

}  // namespace torch_ckpt
