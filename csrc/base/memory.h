#pragma once

// Memory that the engine allocates for I/O buffers and snapshots. Blocks are page-aligned. With
// huge pages, copies have fewer page faults, and requests of direct I/O have fewer segments.

#include <cstdint>
#include <functional>
#include <utility>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

inline constexpr int64_t kPage = 4096;

// One page-aligned block. Move-only; the destructor frees the block.
class Memory {
 public:
  Memory() = default;
  // `release` frees the underlying memory. `populated` memory has all its pages.
  Memory(MutableBytes bytes, std::function<void()> release, bool populated = false)
      : bytes_(bytes), release_(std::move(release)), populated_(populated) {}
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  MutableBytes bytes() const { return bytes_; }
  int64_t nbytes() const { return ssize(bytes_); }

  // Allocates all pages now, with so many threads: huge pages, unless these take much longer than
  // small ones. The bytes do not change. Does nothing if the memory is populated.
  // Errors: that of the kernel, which has no such memory left.
  Status populate(int threads = 1);

 private:
  MutableBytes bytes_;
  std::function<void()> release_;
  bool populated_ = false;
};

// An allocator of blocks. Implementations allocate heap, pinned or shared memory.
class MemorySource {
 public:
  virtual ~MemorySource() = default;

  // Allocates a zeroed block of at least `nbytes` bytes, rounded up to whole pages.
  // Requires: nbytes > 0.
  virtual Result<Memory> allocate(int64_t nbytes) = 0;
};

// Anonymous private memory of this process.
class HeapMemorySource : public MemorySource {
 public:
  Result<Memory> allocate(int64_t nbytes) override;
};

}  // namespace torch_ckpt
