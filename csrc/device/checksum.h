#pragma once

// The sums of blocks that `.index` keeps, of data in the memory of a GPU: so that a load can check
// there what it has read, and a save sum what it is about to copy, without the CPU seeing a byte.
//
// They are XXH3-64 as on the CPU (base/block_sums.h): whatever a reader has, there is one sum. A
// warp sums a block. A CRC-32 would part more freely, but it is not what an index keeps.

#include <cstdint>

#include "base/bytes.h"

namespace torch_ckpt {

// XXH3 is another function for shorter data. Only the last block of a file can be so short, and
// the CPU sums it.
inline constexpr int64_t kLeastSumNbytes = 241;
inline constexpr int64_t kSumAlignment = 16;

// What one warp sums. Requires: nbytes >= kLeastSumNbytes, data at a multiple of kSumAlignment.
struct SumBlock {
  const std::byte* data = nullptr;
  int64_t nbytes = 0;
};

// What a warp would make of a block in ordinary memory.
uint64_t sum_block_on_cpu(const SumBlock& block);

}  // namespace torch_ckpt
