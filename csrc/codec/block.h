#pragma once

// Blocks: the unit of a difference between two versions of a box. A block is 64 KiB of the box's
// row-major bytes; the last one may be shorter. One row of a table describes each block, and
// csrc/format/FORMAT.md states the bytes.

#include <algorithm>
#include <cstdint>

#include "base/bytes.h"

namespace torch_ckpt {

inline constexpr int64_t kBlockNbytes = int64_t{64} << 10;

// Bytes per row of a table.
inline constexpr int64_t kBlockRowNbytes = 24;

// The longest encoded block: every plane is stored as it is.
inline constexpr int64_t kMaxEncodedNbytes = kBlockNbytes + 64;

struct BlockRow {
  uint64_t base = 0;    // XXH3-64 of the block in the version before.
  uint64_t result = 0;  // XXH3-64 of the block in this version.
  uint32_t nbytes = 0;  // Length of the encoded block; 0 if the block has not changed.
  uint32_t check = 0;   // Low half of the XXH3-64 of the encoded block.

  bool operator==(const BlockRow&) const = default;
};

inline BlockRow load_block_row(const std::byte* from) {
  return {load_le<uint64_t>(from), load_le<uint64_t>(from + 8), load_le<uint32_t>(from + 16),
          load_le<uint32_t>(from + 20)};
}

inline void store_block_row(std::byte* to, const BlockRow& row) {
  store_le(to, row.base);
  store_le(to + 8, row.result);
  store_le(to + 16, row.nbytes);
  store_le(to + 20, row.check);
}

// Never overflows.
inline int64_t block_count(int64_t nbytes) {
  return nbytes / kBlockNbytes + (nbytes % kBlockNbytes != 0 ? 1 : 0);
}

// Returns the length of a block of a box of `box_nbytes` bytes.
inline int64_t block_nbytes(int64_t box_nbytes, int64_t block) {
  return std::min(kBlockNbytes, box_nbytes - block * kBlockNbytes);
}

// Returns the bytes per unit of elements of `itemsize` bytes. A block is compared by units. An
// element of 16 bytes is two of them.
inline int64_t unit_of(int64_t itemsize) { return std::min<int64_t>(itemsize, 8); }

}  // namespace torch_ckpt
