#include "io/buffer_pool.h"

#include <limits>

namespace torch_ckpt {
Status BufferPool::check(int64_t nbytes, int64_t block_nbytes) {
  if (block_nbytes <= 0 || block_nbytes > nbytes) {
    return invalid_argument("cannot cut ", nbytes, " bytes of buffers into blocks of ",
                            block_nbytes);
  }
  if (block_nbytes > std::numeric_limits<int64_t>::max() - kPage) {
    return invalid_argument("cannot make blocks of ", block_nbytes, " bytes");
  }
  const int64_t block = align_up(block_nbytes, kPage);
  const int64_t count = nbytes / block;
  if (count < 2 || count > std::numeric_limits<int>::max()) {
    return invalid_argument("cannot use ", nbytes, " bytes of buffers in blocks of ", block,
                            ": that is ", count, " blocks, at least 2 are required");
  }
  return ok_status();
}

Result<std::unique_ptr<BufferPool>> BufferPool::make(MemorySource& source, int64_t nbytes,
                                                     int64_t block_nbytes) {
  RETURN_IF_ERROR(check(nbytes, block_nbytes));
  const int64_t block = align_up(block_nbytes, kPage);
  const int64_t count = nbytes / block;
  ASSIGN_OR_RETURN(Memory memory, source.allocate(count * block));
  return std::unique_ptr<BufferPool>(
      new BufferPool(std::move(memory), static_cast<int>(count), block));
}

BufferPool::BufferPool(Memory memory, int block_count, int64_t block_nbytes)
    : memory_(std::move(memory)),
      block_nbytes_(block_nbytes),
      arena_(slice(memory_.bytes(), 0, block_count * block_nbytes)),
      in_use_(static_cast<size_t>(block_count), false) {
  for (int index = block_count; index-- > 0;) free_.push_back(index);
}

std::optional<int> BufferPool::acquire() {
  if (free_.empty()) return std::nullopt;
  const int index = free_.back();
  free_.pop_back();
  in_use_[static_cast<size_t>(index)] = true;
  return index;
}

void BufferPool::release(int index) {
  if (index < 0 || index >= block_count() || !in_use_[static_cast<size_t>(index)]) return;
  in_use_[static_cast<size_t>(index)] = false;
  free_.push_back(index);
}

}  // namespace torch_ckpt
