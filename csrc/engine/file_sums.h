#pragma once

// The sums of one data file, fetched from the index for those blocks that are read. LoadJob and
// VerifyJob open one with each file; ReadStream checks what it reads against it.

#include <cstdint>
#include <memory>
#include <utility>

#include "base/block_sums.h"
#include "base/status.h"
#include "format/stored_index.h"
#include "geometry/overlap.h"

namespace torch_ckpt {

// Immutable, so that any thread may use it.
class FileSums : public BlockGrid {
 public:
  FileSums(std::shared_ptr<const StoredIndex> index, StoredFile file)
      : BlockGrid{index->block_nbytes(), file.nbytes},
        index_(std::move(index)),
        file_(std::move(file)) {}

  // The first byte of the first block in `bytes`, which begin at `offset` of the file, whose
  // checksum does not match; -1 where all match.
  // Requires: `bytes` are whole blocks of the file. Errors: of reading the index.
  Result<int64_t> first_mismatch(int64_t offset, Bytes bytes) const;

  // Whether the sums of all blocks in a range can be had. Requires: it lies in the file.
  Status check(const ByteRange& range) const;

 private:
  const std::shared_ptr<const StoredIndex> index_;
  const StoredFile file_;
};

}  // namespace torch_ckpt
