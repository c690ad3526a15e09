#include "io/page_cache.h"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

#include "base/retry.h"

namespace torch_ckpt {
namespace {

// Copied from <linux/mman.h> of Linux 6.5: the installed headers may be older than the kernel.
struct CachestatRange {
  uint64_t offset;
  uint64_t nbytes;
};
struct Cachestat {
  uint64_t nr_cache;
  uint64_t nr_dirty;
  uint64_t nr_writeback;
  uint64_t nr_evicted;
  uint64_t nr_recently_evicted;
};
constexpr long kCachestatNumber = 451;  // Same number on every architecture.

std::atomic<bool> cachestat_missing{false};

// Returns 0 and sets `pages` to the number of cached pages, or returns an errno.
int count_cached_pages(int fd, int64_t offset, int64_t nbytes, int64_t* pages) {
  CachestatRange range{static_cast<uint64_t>(offset), static_cast<uint64_t>(nbytes)};
  Cachestat stat{};
  const long rc =
      retry_interrupted([&] { return ::syscall(kCachestatNumber, fd, &range, &stat, 0u); });
  if (rc != 0) return errno;
  *pages = static_cast<int64_t>(stat.nr_cache);
  return 0;
}

bool byte_is_cached(int fd, int64_t offset) {
  std::byte byte;
  const iovec target{&byte, 1};
  return retry_interrupted([&] { return ::preadv2(fd, &target, 1, offset, RWF_NOWAIT); }) == 1;
}

}  // namespace

bool page_cache_has(int fd, int64_t offset, int64_t nbytes) {
  if (offset < 0 || nbytes < 0) return false;
  if (nbytes == 0) return true;  // `cachestat` interprets length 0 as the rest of the file.
  if (!cachestat_missing.load(std::memory_order_relaxed)) {
    int64_t cached = 0;
    const int error = count_cached_pages(fd, offset, nbytes, &cached);
    if (error == 0) {
      const int64_t page = ::sysconf(_SC_PAGESIZE);
      const int64_t first = offset / page;
      const int64_t last = (offset + (nbytes - 1)) / page;
      return cached >= last - first + 1;
    }
    // EPERM means a sandbox, or a kernel that answers only for files that the caller may write.
    // Other files may succeed, so only a missing system call is cached.
    if (error == ENOSYS) cachestat_missing.store(true, std::memory_order_relaxed);
    if (error != ENOSYS && error != EPERM) return false;
  }
  return probe_page_cache(fd, offset, nbytes);
}

bool probe_page_cache(int fd, int64_t offset, int64_t nbytes) {
  if (offset < 0 || nbytes < 0) return false;
  if (nbytes == 0) return true;
  return byte_is_cached(fd, offset) && byte_is_cached(fd, offset + (nbytes - 1));
}

}  // namespace torch_ckpt
