#include "io/posix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

#include "base/retry.h"
#include "io/page_cache.h"
#include "io/storage_call.h"
#include "io/transfer.h"

namespace torch_ckpt {
namespace {

constexpr mode_t kFileMode = 0666;  // Reduced by the umask of the process.
constexpr int kReadOpenAttempts = 8;

// Returns why transfers at kDirectAlignment would fail on an O_DIRECT descriptor; empty if the
// kernel reports no problem.
std::string direct_transfer_problem(int fd) {
#ifdef STATX_DIOALIGN
  struct statx stat = {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &stat) != 0) return "";
  if ((stat.stx_mask & STATX_DIOALIGN) == 0) return "";
  if (stat.stx_dio_offset_align == 0 || stat.stx_dio_mem_align == 0) {
    return "the file system has no direct I/O for this file";
  }
  if (PosixFile::kDirectAlignment % stat.stx_dio_offset_align != 0 ||
      PosixFile::kDirectAlignment % stat.stx_dio_mem_align != 0) {
    return str_cat("direct I/O needs memory at multiples of ", stat.stx_dio_mem_align,
                   " and offsets at multiples of ", stat.stx_dio_offset_align, " here");
  }
#endif
  return "";
}

const char* kind_name(mode_t mode) {
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return S_ISCHR(mode) || S_ISBLK(mode) ? "a device" : "of an unknown kind";
}

// OK for regular files, including those behind symbolic links: caches store files elsewhere and
// link to them.
Status check_regular(const struct stat& stat, const std::string& path) {
  if (S_ISREG(stat.st_mode)) return ok_status();
  if (S_ISDIR(stat.st_mode)) return errno_status(EISDIR, str_cat("cannot open ", path));
  return Status(StatusCode::kStorage,
                str_cat("cannot open ", path, ": it is ", kind_name(stat.st_mode),
                        ", and not a regular file"),
                ENXIO);
}

// Opens a file for reading without blocking: a plain open of a FIFO waits for a writer. The caller
// checks the file type. O_NONBLOCK is cleared afterwards, since io_uring fails on non-blocking
// files.
Descriptor open_to_read(const std::string& path, int flags) {
  flags |= O_RDONLY | O_CLOEXEC;
  Descriptor file(retry_interrupted([&] { return ::open(path.c_str(), flags | O_NONBLOCK); }));
  if (file.valid() && ::fcntl(file.get(), F_SETFL, flags & O_DIRECT) != 0) return Descriptor(-1);
  return file;
}

}  // namespace

Descriptor::~Descriptor() {
  // Never retried: Linux releases the descriptor even on EINTR.
  if (fd_ >= 0) ::close(fd_);
}

Result<std::unique_ptr<PosixFile>> PosixFile::open(const std::string& path, OpenMode mode,
                                                   Caching caching) {
  const StorageCall call("opening", path);
  // Another process may replace the file between the two opens; then open both again.
  const int attempts = mode == OpenMode::kRead ? kReadOpenAttempts : 1;
  Status status;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    std::unique_ptr<PosixFile> file(new PosixFile(path));
    status = file->open_descriptors(mode, caching);
    if (status.ok()) return file;
    if (status.error_number() != ESTALE) break;
  }
  return status;
}

Status PosixFile::open_descriptors(OpenMode mode, Caching caching) {
  const bool create = mode == OpenMode::kCreate;
  // O_NOFOLLOW: never write through a link that another process put at a shared path.
  const int flags = O_CLOEXEC | O_RDWR | (create ? O_CREAT | O_EXCL : O_NOFOLLOW);
  buffered_ =
      mode != OpenMode::kRead
          ? Descriptor(retry_interrupted([&] { return ::open(path_.c_str(), flags, kFileMode); }))
          : open_to_read(path_, 0);
  if (!buffered_.valid()) {
    return errno_status(errno, str_cat("cannot ", create ? "create " : "open ", path_));
  }
  struct stat stat = {};
  if (::fstat(buffered_.get(), &stat) != 0) {
    return errno_status(errno, str_cat("cannot read the attributes of ", path_));
  }
  RETURN_IF_ERROR(check_regular(stat, path_));
  if (caching == Caching::kBuffered) return ok_status();

  const Status status = open_direct(mode);
  // Remove the file that this call created: no other process uses its name yet.
  if (!status.ok() && create) ::unlink(path_.c_str());
  return status;
}

Status PosixFile::open_direct(OpenMode mode) {
  const int flags = O_CLOEXEC | O_RDWR | O_DIRECT;
  Descriptor direct =
      mode != OpenMode::kRead
          ? Descriptor(retry_interrupted([&] { return ::open(path_.c_str(), flags); }))
          : open_to_read(path_, O_DIRECT);
  if (!direct.valid()) {
    if (errno == EINVAL || errno == EOPNOTSUPP) {
      fallback_reason_ = str_cat("O_DIRECT refused by the file system (",
                                 errno == EINVAL ? "EINVAL" : "EOPNOTSUPP", ")");
      return ok_status();
    }
    // The first open succeeded, so the file is being replaced: same as two different files.
    const int error = errno == ENOENT && mode == OpenMode::kRead ? ESTALE : errno;
    return errno_status(error, str_cat("cannot open ", path_, " for direct I/O"));
  }
  struct stat ours = {};
  struct stat theirs = {};
  if (::fstat(buffered_.get(), &ours) != 0 || ::fstat(direct.get(), &theirs) != 0) {
    return errno_status(errno, str_cat("cannot read the attributes of ", path_));
  }
  if (ours.st_dev != theirs.st_dev || ours.st_ino != theirs.st_ino) {
    return errno_status(ESTALE, str_cat("cannot open ", path_, ", which is being replaced"));
  }
  fallback_reason_ = direct_transfer_problem(direct.get());
  if (fallback_reason_.empty()) direct_ = std::move(direct);
  return ok_status();
}

Result<int64_t> PosixFile::size() const {
  const StorageCall call("inspecting", path_);
  struct stat stat = {};
  if (::fstat(buffered_.get(), &stat) != 0) {
    return errno_status(errno, str_cat("cannot read the size of ", path_));
  }
  return static_cast<int64_t>(stat.st_size);
}

bool PosixFile::is_resident(int64_t offset, int64_t nbytes) const {
  return page_cache_has(buffered_.get(), offset, nbytes);
}

Status PosixFile::read(int64_t offset, MutableBytes memory) {
  const StorageCall call("reading", path_);
  return transfer(IoRequest::Kind::kRead, offset, memory);
}

Status PosixFile::write(int64_t offset, Bytes bytes) {
  const StorageCall call("writing", path_);
  // IoRequest has one mutable memory field for both directions. A write only reads it.
  auto* const from = const_cast<std::byte*>(bytes.data());
  return transfer(IoRequest::Kind::kWrite, offset, {from, bytes.size()});
}

Status PosixFile::transfer(IoRequest::Kind kind, int64_t offset, MutableBytes memory) {
  Transfer transfer({.kind = kind,
                     .file = this,
                     .offset = offset,
                     .memory = memory,
                     .caching = Caching::kBuffered});
  std::optional<Status> status = transfer.finished_at_once();
  while (!status) status = transfer.advance(perform(transfer.next()));
  return *status;
}

Status PosixFile::preallocate(int64_t nbytes) {
  const StorageCall call("reserving space for", path_);
  if (nbytes > 0) {
    const int rc = ::fallocate(buffered_.get(), 0, 0, nbytes);
    // File systems and sandboxes refuse to reserve space with any errno, such as EINVAL, or EINTR
    // each time. The file size can still be set. Only errors of the disk itself are returned.
    if (rc != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO)) {
      return errno_status(errno, str_cat("cannot reserve ", nbytes, " bytes for ", path_));
    }
  }
  // fallocate never shrinks a file.
  ASSIGN_OR_RETURN(const int64_t now, size());
  return now == nbytes ? ok_status() : truncate(nbytes);
}

Status PosixFile::truncate(int64_t nbytes) {
  const StorageCall call("setting the length of", path_);
  if (retry_interrupted([&] { return ::ftruncate(buffered_.get(), nbytes); }) != 0) {
    return errno_status(errno, str_cat("cannot make ", path_, " ", nbytes, " bytes long"));
  }
  return ok_status();
}

}  // namespace torch_ckpt
