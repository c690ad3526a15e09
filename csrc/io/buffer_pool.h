#pragma once

// The buffers that a save or load streams through: one block of memory, cut into equal parts that
// are filled, written and used again. One block, so that a queue can register it with the kernel
// once; kept from job to job, because making and registering memory costs more than a small job.

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

// Used by one thread at a time: the one that runs the job. (What a held block contains may be
// touched by any.)
class BufferPool {
 public:
  // As many blocks of `block_nbytes`, rounded up to whole pages, as fit into `nbytes`.
  // kInvalidArgument unless that is at least two: one is filled while another is on its way.
  static Result<std::unique_ptr<BufferPool>> make(MemorySource& source, int64_t nbytes,
                                                  int64_t block_nbytes);

  // Whether `make` would do, and if not, why.
  static Status check(int64_t nbytes, int64_t block_nbytes);

  // Reserves the pool for one job; false where another has it. Safe to call from any thread.
  bool claim() { return !claimed_.test_and_set(); }

  // Ends the reservation. Requires: every block has been given back.
  void unclaim() { claimed_.clear(); }

  // All blocks, for `FileSystem::make_queue`. Lives as long as the pool.
  MutableBytes arena() const { return arena_; }

  int block_count() const { return static_cast<int>(held_.size()); }
  int64_t block_nbytes() const { return block_nbytes_; }

  // Requires: 0 <= index < block_count().
  MutableBytes block(int index) const {
    return slice(arena_, index * block_nbytes_, block_nbytes_);
  }

  int free_count() const { return static_cast<int>(free_.size()); }

  // The index of a block that nobody holds, with whatever bytes its last holder left; nothing when
  // all are held.
  std::optional<int> acquire();

  // Gives a block back. Does nothing to a block that is not held.
  void release(int index);

 private:
  BufferPool(Memory memory, int block_count, int64_t block_nbytes);

  std::atomic_flag claimed_;
  const Memory memory_;
  const int64_t block_nbytes_;
  const MutableBytes arena_;
  std::vector<bool> held_;
  std::vector<int> free_;  // The last one given back is taken first: it is warm in the cache.
};

}  // namespace torch_ckpt
