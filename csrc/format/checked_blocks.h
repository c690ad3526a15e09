#pragma once

// CheckedBlocks: reads a region of a file on demand, in blocks of 64 KiB, and verifies each block.
//
// Checksums form a tree of two levels. The table has the sum of every block of the body. The top
// has the sum of every block of the table. The caller supplies the sum of the top. So reading and
// verifying one byte requires at most three blocks. An LRU cache retains recent blocks.
//
// The file is read, not mapped: a truncated mapped file ends the process by SIGBUS.

#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Reads exactly `into.size()` bytes at `offset` of a file. Safe to call from any thread.
using ReadAt = std::function<Status(int64_t offset, MutableBytes into)>;

// A byte range of a file.
struct Region {
  int64_t offset = 0;
  int64_t nbytes = 0;
};

// Safe to use from any thread.
class CheckedBlocks {
 public:
  static constexpr int64_t kBlockNbytes = int64_t{64} << 10;
  static constexpr int64_t kSumsInBlock = kBlockNbytes / static_cast<int64_t>(sizeof(uint64_t));

  // Positions of the blocks and of their sums in the file.
  struct Place {
    Region body;
    Region table;
    Region top;            // At most one block long.
    uint64_t top_sum = 0;  // XXH3 of the top.
  };

  // Returns whether table and top have exactly one sum per block and the top fits one block.
  static bool is_whole(const Place& place);

  // `where` names the file in messages. The constructor reads nothing. Requires: is_whole(place).
  CheckedBlocks(ReadAt read, const Place& place, int64_t cache_nbytes, std::string where);

  // Copies bytes at `offset` of the file. Requires: the range lies in the body.
  // Errors: kCorruption if a block fails its checksum; errors of `ReadAt`.
  Status read(int64_t offset, MutableBytes into) const;

  // Reads and verifies the blocks that contain the range, without copying. Requires and errors: as
  // `read`.
  Status check(int64_t offset, int64_t nbytes) const;

  // Returns the damaged ranges of the body in ascending order, in whole blocks. A damaged table or
  // top counts as damage of every block whose sum it contains. Errors: errors of `ReadAt`.
  Result<std::vector<Region>> damage() const;

 private:
  enum class Layer { kBody, kTable };
  struct Block {
    int64_t key;
    std::vector<std::byte> bytes;
  };

  // Require: the caller holds the mutex. A block is valid until the next call of `block`.
  Result<Bytes> block(Layer layer, int64_t number) const;
  Result<uint64_t> sum_of(Layer layer, int64_t number) const;
  Status load_top() const;

  const ReadAt read_;
  const Place place_;
  const size_t max_blocks_;
  const std::string where_;
  mutable std::mutex mutex_;            // Guards the members below.
  mutable std::vector<std::byte> top_;  // Empty until first use.
  mutable std::list<Block> used_;       // Cached blocks, most recently used first.
  mutable std::unordered_map<int64_t, std::list<Block>::iterator> cached_;
};

}  // namespace torch_ckpt
