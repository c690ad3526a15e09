#include "io/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>

#include "base/retry.h"
#include "io/posix_file.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kBlock = 512;  // Unit of `st_blocks`.
constexpr mode_t kOwnerOnly = 0600;

Result<Memory> map(const Descriptor& file, const std::string& path, int64_t nbytes, bool writable,
                   bool at_hand) {
  const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  const int flags = MAP_SHARED | (at_hand ? MAP_POPULATE : 0);
  void* address = ::mmap(nullptr, static_cast<size_t>(nbytes), access, flags, file.get(), 0);
  if (address == MAP_FAILED) {
    return errno_status(errno, str_cat("cannot map ", nbytes, " bytes of ", path));
  }
  auto* begin = static_cast<std::byte*>(address);
  // A forked child would keep the memory of a removed file for as long as it lives. It must not
  // unmap what it has put there since.
  const bool is_of_parent_only =
      writable && ::madvise(address, static_cast<size_t>(nbytes), MADV_DONTFORK) == 0;
  const pid_t owner = is_of_parent_only ? ::getpid() : 0;
  return Memory({begin, static_cast<size_t>(nbytes)}, [begin, nbytes, owner] {
    if (owner == 0 || owner == ::getpid()) ::munmap(begin, static_cast<size_t>(nbytes));
  });
}

}  // namespace

Result<bool> is_in_memory(const std::string& directory) {
  struct statfs stat = {};
  if (retry_interrupted([&] { return ::statfs(directory.c_str(), &stat); }) != 0) {
    return errno_status(errno, str_cat("cannot stat the file system of ", directory));
  }
  return stat.f_type == TMPFS_MAGIC || stat.f_type == RAMFS_MAGIC || stat.f_type == HUGETLBFS_MAGIC;
}

Result<Memory> create_shared_memory(const std::string& path, int64_t nbytes) {
  const int64_t size = align_up(nbytes, kPage);
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  const Descriptor file(retry_interrupted([&] { return ::open(path.c_str(), flags, kOwnerOnly); }));
  if (!file.valid()) return errno_status(errno, str_cat("cannot create ", path));
  if (retry_interrupted([&] { return ::fallocate(file.get(), 0, 0, size); }) != 0) {
    const int error = errno;
    ::unlink(path.c_str());
    return errno_status(error, str_cat("cannot reserve ", size, " bytes of memory as ", path));
  }
  Result<Memory> memory = map(file, path, size, true, true);
  if (!memory.ok()) ::unlink(path.c_str());
  return memory;
}

Result<Memory> map_shared_memory(const std::string& path, bool writable, bool at_hand) {
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const Descriptor file(retry_interrupted([&] { return ::open(path.c_str(), flags); }));
  if (!file.valid()) return errno_status(errno, str_cat("cannot open ", path));
  struct stat stat = {};
  if (::fstat(file.get(), &stat) != 0) return errno_status(errno, str_cat("cannot stat ", path));
  if (!S_ISREG(stat.st_mode) || stat.st_size == 0 || stat.st_size % kPage != 0 ||
      stat.st_blocks * kBlock < stat.st_size) {
    return corruption("cannot use ", path, ": its memory is not fully reserved");
  }
  return map(file, path, stat.st_size, writable, at_hand);
}

}  // namespace torch_ckpt
