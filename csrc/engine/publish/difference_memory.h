#pragma once

// Memory of raw differences. It is reused, since new pages would take longer than the comparison.

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memory.h"
#include "base/status.h"

namespace torch_ckpt {

// Memory that differences fill one after another. It is free once none of them has it any more.
struct DifferenceChunk {
  Memory memory;
  int64_t filled_nbytes = 0;
};

// Chunks of memory. Has the most that differences have used at a time. Safe to use from any thread.
class DifferenceMemory : public std::enable_shared_from_this<DifferenceMemory> {
 public:
  // A chunk has room for the streams of several blocks.
  static constexpr int64_t kChunkNbytes = int64_t{256} << 10;

  // Returns a chunk with room for so many bytes, at most kChunkNbytes, that no other thread fills.
  // Errors: kStorage (ENOMEM) if memory is short.
  // Requires: a shared pointer owns this object.
  Result<std::shared_ptr<DifferenceChunk>> acquire(int64_t nbytes);

  // Lets the next difference fill the rest of a chunk.
  void hand_on(std::shared_ptr<DifferenceChunk> chunk);

 private:
  void release(Memory memory);

  std::mutex mutex_;
  std::vector<std::shared_ptr<DifferenceChunk>> begun_;
  std::vector<Memory> free_;
};

}  // namespace torch_ckpt
