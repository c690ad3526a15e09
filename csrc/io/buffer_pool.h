#pragma once

// The buffers of a save or load: one memory block, cut into equal blocks that are filled, written
// and reused. A queue registers the whole memory with the kernel once. Pools are reused across
// jobs, because allocating and registering memory costs more than a small job.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/memory.h"
#include "base/status.h"

namespace torch_ckpt {

// Used by one thread at a time: the one that runs the job. Any thread may access the bytes of an
// acquired block.
class BufferPool {
 public:
  // Makes a pool of as many blocks of `block_nbytes` bytes, rounded up to whole pages, as fit into
  // `nbytes`. kInvalidArgument for fewer than two blocks: one is filled while another is in flight.
  static Result<std::unique_ptr<BufferPool>> make(MemorySource& source, int64_t nbytes,
                                                  int64_t block_nbytes);

  // Returns OK if `make` accepts these sizes, else its error.
  static Status check(int64_t nbytes, int64_t block_nbytes);

  // Reserves the pool for one job; false if another job has it. Safe to call from any thread.
  bool claim() { return !claimed_.test_and_set(); }

  // Ends the reservation. Requires: every block was released.
  void unclaim() { claimed_.clear(); }

  // Allocates the pages of all blocks, as `Memory::populate` does: worth its time before direct
  // I/O.
  Status populate() { return memory_.populate(); }

  // The memory of all blocks, for `IoQueue::register_memory`. Valid as long as the pool.
  MutableBytes arena() const { return arena_; }

  int block_count() const { return static_cast<int>(in_use_.size()); }
  int64_t block_nbytes() const { return block_nbytes_; }

  // Requires: 0 <= index < block_count().
  MutableBytes block(int index) const {
    return slice(arena_, index * block_nbytes_, block_nbytes_);
  }

  int free_count() const { return static_cast<int>(free_.size()); }

  // Returns the index of a free block, or nullopt. The block contains the bytes of its last use.
  std::optional<int> acquire();

  // Releases a block. Does nothing if the block is not acquired.
  void release(int index);

 private:
  BufferPool(Memory memory, int block_count, int64_t block_nbytes);

  std::atomic_flag claimed_;
  Memory memory_;
  const int64_t block_nbytes_;
  const MutableBytes arena_;
  std::vector<bool> in_use_;
  std::vector<int> free_;  // Used as a stack: the last released block is warm in the cache.
};

}  // namespace torch_ckpt
