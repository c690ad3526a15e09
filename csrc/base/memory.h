#pragma once

// Memory that the engine itself owns: the buffers that bytes pass through on their way to or from a
// disk. Page-aligned, in huge pages where the kernel grants them, which makes direct I/O from it
// markedly faster (fewer segments a request).

#include <cstdint>
#include <functional>
#include <utility>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// One page-aligned block. Move-only; freed by its destructor.
class Memory {
 public:
  Memory() = default;
  // `release` frees what the block is made of.
  Memory(MutableBytes bytes, std::function<void()> release)
      : bytes_(bytes), release_(std::move(release)) {}
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  MutableBytes bytes() const { return bytes_; }
  int64_t nbytes() const { return ssize(bytes_); }

 private:
  MutableBytes bytes_;
  std::function<void()> release_;
};

// Where blocks come from. Pinned and shared memory are other sources of the same blocks.
class MemorySource {
 public:
  virtual ~MemorySource() = default;

  // A block of at least `nbytes` zero bytes, a multiple of the page size.
  // Requires: nbytes > 0.
  virtual Result<Memory> allocate(int64_t nbytes) = 0;
};

// Anonymous private memory of this process.
class HeapMemorySource : public MemorySource {
 public:
  Result<Memory> allocate(int64_t nbytes) override;
};

}  // namespace torch_ckpt
