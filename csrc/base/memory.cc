#include "base/memory.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/huge_page_budget.h"
#include "base/parallel_for.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

// The length of the pieces that threads populate.
constexpr int64_t kChunkNbytes = kHugePage;

// Memory that shows how long small pages take.
constexpr int64_t kSampleNbytes = int64_t{512} << 10;

using Nanoseconds = std::chrono::nanoseconds;

// The processor time of this thread. Unlike the time of the clock, it has no time slices of others.
Nanoseconds thread_time() {
  timespec now = {};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + Nanoseconds(now.tv_nsec);
}

// Populates memory with pages of the advised kind. Returns the time, and an errno or 0.
std::pair<Nanoseconds, int> populate_with(MutableBytes memory, int advice) {
  // Advice only: if it fails, the code is still correct, but slower.
  ::madvise(memory.data(), memory.size(), advice);
  const Nanoseconds started = thread_time();
  if (::madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE) != 0) {
    if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) return {{}, errno};
    // This kernel lacks MADV_POPULATE_WRITE, or a sandbox refuses it.
    for (int64_t at = 0; at < ssize(memory); at += kPage) {
      // Atomically, because a read may be writing other bytes to the page.
      auto& first = reinterpret_cast<unsigned char&>(memory[static_cast<size_t>(at)]);
      std::atomic_ref<unsigned char>(first).fetch_or(0);
    }
  }
  return {thread_time() - started, 0};
}

}  // namespace

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(release_, other.release_);
  std::swap(populated_, other.populated_);
  return *this;
}

Memory::~Memory() {
  if (release_) release_();
}

Status Memory::populate(int threads) {
  if (populated_) return ok_status();
  Nanoseconds small_time(0);
  bool may_be_huge = false;  // Without a sample, it is unknown whether huge pages are slow.
  if (nbytes() >= kHugePage) {
    const Result<Memory> sample = HeapMemorySource().allocate(kSampleNbytes);
    if (sample.ok()) {
      const auto [time, failed] = populate_with(sample->bytes(), MADV_NOHUGEPAGE);
      small_time = time;
      may_be_huge = failed == 0;
    }
  }
  HugePageBudget huge_pages(small_time, kSampleNbytes);
  std::atomic<int> error = 0;
  parallel_for((nbytes() + kChunkNbytes - 1) / kChunkNbytes, threads, [&](int64_t n) {
    const int64_t begin = n * kChunkNbytes;
    const int64_t nbytes_here = std::min(kChunkNbytes, nbytes() - begin);
    const bool huge = may_be_huge && !huge_pages.is_spent();
    const auto [time, chunk_error] =
        populate_with(slice(bytes_, begin, nbytes_here), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (huge) huge_pages.add(time, nbytes_here);
    if (chunk_error != 0) error = chunk_error;
  });
  if (error != 0) return errno_status(error, str_cat("cannot allocate ", nbytes(), " bytes"));
  populated_ = true;
  return ok_status();
}

Result<Memory> HeapMemorySource::allocate(int64_t nbytes) {
  const int64_t size = align_up(nbytes, kPage);
  // A huge page needs an aligned address: map one huge page more, then unmap both ends.
  const int64_t mapped = size < kHugePage ? size : size + kHugePage;
  void* address = ::mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    return errno_status(errno, str_cat("cannot allocate ", size, " bytes of buffers"));
  }
  auto* begin = static_cast<std::byte*>(address);
  if (mapped != size) {
    const auto start = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin));
    const int64_t head = align_up(start, kHugePage) - start;
    const int64_t tail = mapped - size - head;
    if (head > 0) ::munmap(begin, static_cast<size_t>(head));
    if (tail > 0) ::munmap(begin + head + size, static_cast<size_t>(tail));
    begin += head;
  }
  return Memory({begin, static_cast<size_t>(size)},
                [begin, size] { ::munmap(begin, static_cast<size_t>(size)); });
}

}  // namespace torch_ckpt
