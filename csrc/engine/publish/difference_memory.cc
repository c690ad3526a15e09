#include "engine/publish/difference_memory.h"

#include <utility>

namespace torch_ckpt {

Result<std::shared_ptr<DifferenceChunk>> DifferenceMemory::acquire(int64_t nbytes) {
  std::vector<std::shared_ptr<DifferenceChunk>> full;  // Their release takes the lock.
  Memory memory;
  {
    const std::lock_guard lock(mutex_);
    while (!begun_.empty()) {
      std::shared_ptr<DifferenceChunk> chunk = std::move(begun_.back());
      begun_.pop_back();
      if (chunk->filled_nbytes + nbytes <= kChunkNbytes) return chunk;
      full.push_back(std::move(chunk));
    }
    if (!free_.empty()) {
      memory = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (memory.bytes().empty()) {
    ASSIGN_OR_RETURN(memory, HeapMemorySource().allocate(kChunkNbytes));
  }
  const auto release = [from = weak_from_this()](DifferenceChunk* chunk) {
    if (const auto owner = from.lock()) owner->release(std::move(chunk->memory));
    delete chunk;
  };
  return std::shared_ptr<DifferenceChunk>(new DifferenceChunk{std::move(memory)}, release);
}

void DifferenceMemory::hand_on(std::shared_ptr<DifferenceChunk> chunk) {
  const std::lock_guard lock(mutex_);
  begun_.push_back(std::move(chunk));
}

void DifferenceMemory::release(Memory memory) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
}

}  // namespace torch_ckpt
