#pragma once

// Checksums of a file's blocks. With one sum per block, a reader can verify any range without
// reading the rest of the file. `engine` computes the sums while it writes and stores them in
// the index. A reader rounds each wanted range out to whole blocks.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/xxh3.h"

namespace torch_ckpt {

// The smallest unit of verification. With small blocks, a read of one row verifies few extra bytes.
// With large blocks, the sums are short: 1/8192 of the data at this size.
inline constexpr int64_t kSumBlockNbytes = int64_t{64} << 10;

// The division of a file of `file_nbytes` bytes into blocks. Block i begins at i * block_nbytes.
// The last block ends at the end of the file.
struct BlockGrid {
  int64_t block_nbytes = kSumBlockNbytes;
  int64_t file_nbytes = 0;

  bool operator==(const BlockGrid&) const = default;

  // Returns the number of blocks of a file.
  static int64_t block_count(int64_t file_nbytes, int64_t block_nbytes) {
    return file_nbytes / block_nbytes + (file_nbytes % block_nbytes != 0);
  }

  // Rounds [begin, end) out to whole blocks. Requires: 0 <= begin <= end <= file_nbytes.
  int64_t block_begin(int64_t begin) const { return align_down(begin, block_nbytes); }
  int64_t block_end(int64_t end) const {
    return std::min(align_up(end, block_nbytes), file_nbytes);
  }
};

// The checksums of all blocks of a file.
struct BlockSums : BlockGrid {
  std::vector<uint64_t> sums;

  bool operator==(const BlockSums&) const = default;

  // Returns the file offset of the first block in `bytes` whose checksum does not match, or -1 if
  // all match. `offset` is the position of `bytes` in the file.
  // Requires: `bytes` are whole blocks of the file.
  int64_t first_mismatch(int64_t offset, Bytes bytes) const;
};

// Computes block sums of a byte stream that arrives in order, in chunks of any size. Used by one
// thread at a time.
class BlockSummer {
 public:
  // Requires: block_nbytes > 0.
  explicit BlockSummer(int64_t block_nbytes) { sums_.block_nbytes = block_nbytes; }

  void append(Bytes bytes);

  // Returns the sums of all appended bytes.
  // Requires: nothing is appended afterwards.
  BlockSums finish();

 private:
  BlockSums sums_;
  Xxh3Stream block_;    // Running checksum of the last, incomplete block.
  int64_t filled_ = 0;  // Length of the incomplete block, in bytes.
};

}  // namespace torch_ckpt
