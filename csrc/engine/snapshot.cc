#include "engine/snapshot.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

// What a thread takes at a time: long enough to run at the speed of memory, short enough to share.
constexpr int64_t kPart = int64_t{4} << 20;

constexpr int64_t kPage = 4096;

// Calls `work(i)` for every i in [0, count), by this thread and others, as many as there can be.
template <typename Work>
void share(int64_t count, int threads, const Work& work) {
  std::atomic<int64_t> next = 0;
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  const int64_t most = std::min<int64_t>(threads, count);
  try {
    for (int64_t i = 1; i < most; ++i) others.emplace_back(run);
  } catch (const std::system_error&) {
    // No more threads to be had: those that run do all the work.
  }
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace

Result<std::unique_ptr<Snapshot>> Snapshot::make(MemorySource& source, int64_t nbytes,
                                                 int threads) {
  if (nbytes <= 0) return invalid_argument("cannot make a snapshot of ", nbytes, " bytes");
  ASSIGN_OR_RETURN(Memory memory, source.allocate(nbytes));
  const MutableBytes bytes = memory.bytes();
  std::atomic<int> failed = 0;
  share((ssize(bytes) + kPart - 1) / kPart, threads, [&](int64_t part) {
    const int64_t begin = part * kPart;
    const MutableBytes some = slice(bytes, begin, std::min(kPart, ssize(bytes) - begin));
    if (::madvise(some.data(), some.size(), MADV_POPULATE_WRITE) == 0) return;
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

Status Snapshot::fill(std::span<const SnapshotCopy> copies, int threads) const {
  std::vector<SnapshotCopy> parts;
  for (const SnapshotCopy& copy : copies) {
    const int64_t nbytes = ssize(copy.source);
    if (copy.offset < 0 || copy.offset > memory_.nbytes() - nbytes) {
      return invalid_argument("cannot copy ", nbytes, " bytes to ", copy.offset,
                              " of a snapshot of ", memory_.nbytes());
    }
    for (int64_t begin = 0; begin < nbytes; begin += kPart) {
      parts.push_back(
          {slice(copy.source, begin, std::min(kPart, nbytes - begin)), copy.offset + begin});
    }
  }
  share(std::ssize(parts), threads, [&](int64_t i) {
    const SnapshotCopy& part = parts[static_cast<size_t>(i)];
    std::memcpy(memory().data() + part.offset, part.source.data(), part.source.size());
  });
  return ok_status();
}

}  // namespace torch_ckpt
