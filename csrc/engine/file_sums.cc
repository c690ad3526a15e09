#include "engine/file_sums.h"

#include <vector>

namespace torch_ckpt {

Result<int64_t> FileSums::first_mismatch(int64_t offset, Bytes bytes) const {
  const int64_t first = offset / block_nbytes;
  BlockSums expected;
  expected.block_nbytes = block_nbytes;
  expected.file_nbytes = ssize(bytes);
  ASSIGN_OR_RETURN(expected.sums,
                   index_->sums(file_, first, first + block_count(ssize(bytes), block_nbytes)));
  const int64_t mismatch = expected.first_mismatch(0, bytes);
  return mismatch < 0 ? mismatch : offset + mismatch;
}

Status FileSums::check(const ByteRange& range) const {
  if (range.nbytes() <= 0) return ok_status();
  return index_->check_sums(file_, range.begin / block_nbytes,
                            block_count(range.end, block_nbytes));
}

}  // namespace torch_ckpt
