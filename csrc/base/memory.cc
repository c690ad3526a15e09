#include "base/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

namespace torch_ckpt {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(release_, other.release_);
  return *this;
}

Memory::~Memory() {
  if (release_) release_();
}

Result<Memory> HeapMemorySource::allocate(int64_t nbytes) {
  const int64_t size = align_up(nbytes, kPage);
  // A huge page needs an aligned address: map one huge page more, then unmap both ends. No
  // MADV_HUGEPAGE here: on fragmented memory the kernel would compact pages for longer than most
  // buffers live.
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
