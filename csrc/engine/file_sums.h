#pragma once

// FileSums: the block checksums of one data file, read from the index on demand. LoadJob and
// VerifyJob create one for each open file. ReadStream verifies the blocks that it reads.

#include <cstdint>
#include <memory>
#include <utility>

#include "base/block_sums.h"
#include "base/status.h"
#include "format/stored_index.h"
#include "geometry/overlap.h"

namespace torch_ckpt {

// Immutable and safe to use from any thread.
class FileSums : public BlockGrid {
 public:
  FileSums(std::shared_ptr<const StoredIndex> index, StoredFile file)
      : BlockGrid{index->block_nbytes(), file.nbytes},
        index_(std::move(index)),
        file_(std::move(file)) {}

  // Returns the file offset of the first block whose checksum does not match, or -1 if all blocks
  // match. `bytes` begin at `offset` of the file.
  // Requires: `bytes` are whole blocks of the file. Errors: those of reading the index.
  Result<int64_t> first_mismatch(int64_t offset, Bytes bytes) const;

  // Checks that the index can supply the sums of all blocks in `range`.
  // Requires: the range lies in the file.
  Status check(const ByteRange& range) const;

 private:
  const std::shared_ptr<const StoredIndex> index_;
  const StoredFile file_;
};

}  // namespace torch_ckpt
