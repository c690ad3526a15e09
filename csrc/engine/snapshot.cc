#include "engine/snapshot.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torch_ckpt {
namespace {

// What a thread takes at a time: long enough to run at the speed of memory, short enough to share.
constexpr int64_t kPart = int64_t{4} << 20;

constexpr int64_t kPage = 4096;

// For the pages of a part. Where memory is fragmented, the kernel moves other pages about to make
// huge ones, a hundred times as long as they save.
constexpr auto kPatience = std::chrono::milliseconds(8);

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

// As memcpy, but past the caches: nobody reads the copy soon, and fetching what it overwrites would
// cost a third of the time.
void copy_past_caches(Bytes from, std::byte* to) {
  const std::byte* in = from.data();
  size_t left = from.size();
#if defined(__SSE2__)
  constexpr size_t kVector = sizeof(__m128i);
  const size_t head = std::min((kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector, left);
  std::memcpy(to, in, head);
  in += head;
  to += head;
  left -= head;
  for (; left >= 4 * kVector; left -= 4 * kVector, in += 4 * kVector, to += 4 * kVector) {
    const auto* vectors = reinterpret_cast<const __m128i*>(in);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(vectors);
    const __m128i b = _mm_loadu_si128(vectors + 1);
    const __m128i c = _mm_loadu_si128(vectors + 2);
    const __m128i d = _mm_loadu_si128(vectors + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(to, in, left);
}

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
    // Only advice, too.
    if (huge_pages_are_slow) ::madvise(some.data(), some.size(), MADV_NOHUGEPAGE);
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
    copy_past_caches(part.source, memory().data() + part.offset);
  });
  return ok_status();
}

}  // namespace torch_ckpt
