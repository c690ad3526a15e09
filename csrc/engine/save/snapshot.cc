#include "engine/save/snapshot.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/share.h"

namespace torch_ckpt {
namespace {

// What a thread takes at a time: long enough to run at the speed of memory, short enough to share.
constexpr int64_t kPart = int64_t{4} << 20;

constexpr int64_t kPage = 4096;

// For the pages of a part. Where memory is fragmented, the kernel moves other pages about to make
// huge ones, a hundred times as long as they save.
constexpr auto kPatience = std::chrono::milliseconds(8);

}  // namespace

Result<std::unique_ptr<Snapshot>> Snapshot::make(MemorySource& source, int64_t nbytes,
                                                 int threads) {
  if (nbytes <= 0) return invalid_argument("cannot make a snapshot of ", nbytes, " bytes");
  ASSIGN_OR_RETURN(Memory memory, source.allocate(nbytes));
  const MutableBytes bytes = memory.bytes();
  std::atomic<int> failed = 0;
  std::atomic<bool> huge_pages_are_slow = false;
  share((ssize(bytes) + kPart - 1) / kPart, threads, [&](int64_t part) {
    const int64_t begin = part * kPart;
    const MutableBytes some = slice(bytes, begin, std::min(kPart, ssize(bytes) - begin));
    // Only advice: without it everything works, more slowly.
    ::madvise(some.data(), some.size(), huge_pages_are_slow ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    const auto started = std::chrono::steady_clock::now();
    const int populated = ::madvise(some.data(), some.size(), MADV_POPULATE_WRITE);
    if (std::chrono::steady_clock::now() - started > kPatience) huge_pages_are_slow = true;
    if (populated == 0) return;
    if (errno != EINVAL) {
      failed = errno;
      return;
    }
    // A kernel that has no such advice.
    for (int64_t at = 0; at < ssize(some); at += kPage)
      some[static_cast<size_t>(at)] = std::byte{0};
  });
  if (failed != 0)
    return errno_status(failed, str_cat("cannot allocate ", nbytes, " bytes of snapshot"));
  return std::unique_ptr<Snapshot>(new Snapshot(std::move(memory)));
}

Status Snapshot::fill(std::span<const PackedCopy> copies, int threads) {
  return target_.copy(copies, memory(), threads);
}

}  // namespace torch_ckpt
