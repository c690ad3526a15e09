#pragma once

// Checksums of the blocks of a file, so that any part of it can be checked without reading the
// rest: `engine` sums what it writes, `.index` keeps the sums, and a reader rounds what it wants
// out to whole blocks.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/xxh3.h"

namespace torch_ckpt {

// A block is the least that can be checked. Small enough that a row of a tensor costs little more
// to read than its own bytes, large enough that sums are an 8192nd of the data.
inline constexpr int64_t kSumBlockNbytes = int64_t{64} << 10;

// The blocks of a file of `file_nbytes` bytes: block i is [i, i + 1) * block_nbytes of it, the last
// one cut off at its end.
struct BlockGrid {
  int64_t block_nbytes = kSumBlockNbytes;
  int64_t file_nbytes = 0;

  bool operator==(const BlockGrid&) const = default;

  // How many blocks a file has.
  static int64_t block_count(int64_t file_nbytes, int64_t block_nbytes) {
    return file_nbytes / block_nbytes + (file_nbytes % block_nbytes != 0);
  }

  // [begin, end) rounded out to whole blocks. Requires: 0 <= begin <= end <= file_nbytes.
  int64_t block_begin(int64_t begin) const { return align_down(begin, block_nbytes); }
  int64_t block_end(int64_t end) const {
    return std::min(align_up(end, block_nbytes), file_nbytes);
  }
};

// All of a file's blocks and their sums.
struct BlockSums : BlockGrid {
  std::vector<uint64_t> sums;

  bool operator==(const BlockSums&) const = default;

  // The first byte of the first block in `bytes`, which begin at `offset` of the file, whose
  // checksum does not match; -1 where all match.
  // Requires: `bytes` are whole blocks of the file.
  int64_t first_mismatch(int64_t offset, Bytes bytes) const;
};

// Sums bytes that come in order and in parts. Used by one thread at a time.
class BlockSummer {
 public:
  // Requires: block_nbytes > 0.
  explicit BlockSummer(int64_t block_nbytes) { sums_.block_nbytes = block_nbytes; }

  void append(Bytes bytes);

  // The sums of all that was appended. Nothing can be appended afterwards.
  BlockSums finish();

 private:
  BlockSums sums_;
  Xxh3Stream block_;    // Of the block that is not full yet.
  int64_t filled_ = 0;  // Bytes of it.
};

}  // namespace torch_ckpt
