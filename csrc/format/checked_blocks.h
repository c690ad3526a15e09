#pragma once

// The part of a file that is read on demand: by blocks of 64 KiB, each checked when it is read.
//
// The file has a table with the sum of every block, and a top with the sum of every block of the
// table, whose own sum the caller knows to be true. So any byte can be had, and be known to be what
// was written, by reading three blocks at most; those used last are kept.
//
// The file is read, not mapped: a mapped file that somebody cuts off ends the process by SIGBUS.

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

// Part of a file, in bytes.
struct Region {
  int64_t offset = 0;
  int64_t nbytes = 0;
};

// Safe to use from any thread.
class CheckedBlocks {
 public:
  static constexpr int64_t kBlockNbytes = int64_t{64} << 10;
  static constexpr int64_t kSumsInBlock = kBlockNbytes / static_cast<int64_t>(sizeof(uint64_t));

  // Where the blocks and their sums lie, from the start of the file.
  struct Place {
    Region body;
    Region table;
    Region top;  // At most one block.
    uint64_t top_sum = 0;
  };

  // Whether table and top have a sum for each block, and the top is no longer than it may be.
  static bool is_whole(const Place& place);

  // `where` names the file in messages. Reads nothing yet. Requires: is_whole(place).
  CheckedBlocks(ReadAt read, const Place& place, int64_t cache_nbytes, std::string where);

  // Copies bytes at `offset` of the file. Requires: they lie in the body.
  // Errors: kCorruption where a block fails its sum; whatever reading fails with.
  Status read(int64_t offset, MutableBytes into) const;

  // Reads and checks the blocks that hold a part of the body, as `read` would.
  Status check(int64_t offset, int64_t nbytes) const;

  // Every part of the body that fails its sum, ascending, by whole blocks; all that a damaged table
  // or top has the sums of is taken to fail. Errors: whatever reading fails with.
  Result<std::vector<Region>> damage() const;

 private:
  enum class Part { kBody, kTable };
  struct Block {
    int64_t key;
    std::vector<std::byte> bytes;
  };

  // The following hold the mutex. A block stays until another is asked for.
  Result<Bytes> block(Part part, int64_t number) const;
  Result<uint64_t> sum_of(Part part, int64_t number) const;
  Status load_top() const;

  const ReadAt read_;
  const Place place_;
  const size_t max_blocks_;
  const std::string where_;
  mutable std::mutex mutex_;            // Guards everything below.
  mutable std::vector<std::byte> top_;  // Empty until it is needed.
  mutable std::list<Block> used_;       // The last used first.
  mutable std::unordered_map<int64_t, std::list<Block>::iterator> known_;
};

}  // namespace torch_ckpt
