#include "io/file_system.h"

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

Result<std::vector<std::byte>> read_file(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const auto file, fs.open(path, OpenMode::kRead, Caching::kBuffered));
  ASSIGN_OR_RETURN(const int64_t nbytes, file->size());
  std::vector<std::byte> bytes;
  try {
    bytes.resize(static_cast<size_t>(nbytes));
  } catch (const std::exception&) {  // A damaged file may claim any size.
    return errno_status(ENOMEM, str_cat("cannot read ", nbytes, " bytes of ", path));
  }
  if (nbytes == 0) return bytes;
  const auto queue = fs.make_queue(1);
  IoRequest request{.kind = IoRequest::Kind::kRead, .file = file.get(), .memory = bytes};
  request.caching = Caching::kBuffered;
  RETURN_IF_ERROR(run_one(*queue, request));
  return bytes;
}

Status write_file(FileSystem& fs, const std::string& path, Bytes bytes, bool sync) {
  ASSIGN_OR_RETURN(const auto file, fs.open(path, OpenMode::kCreate, Caching::kBuffered));
  const auto queue = fs.make_queue(1);
  // A write only reads its memory; a request has one field for both directions.
  const MutableBytes memory(const_cast<std::byte*>(bytes.data()), bytes.size());
  IoRequest request{.kind = IoRequest::Kind::kWrite, .file = file.get(), .memory = memory};
  request.caching = Caching::kBuffered;
  RETURN_IF_ERROR(run_one(*queue, request));
  if (!sync) return ok_status();
  request.kind = IoRequest::Kind::kSync;
  return run_one(*queue, request);
}

}  // namespace torch_ckpt
