#include "base/block_sums.h"

#include <algorithm>
#include <utility>

namespace torch_ckpt {

int64_t BlockSums::first_mismatch(int64_t offset, Bytes bytes) const {
  for (int64_t begin = 0; begin < ssize(bytes); begin += block_nbytes) {
    const Bytes block = slice(bytes, begin, std::min(block_nbytes, ssize(bytes) - begin));
    if (xxh3(block) != sums[static_cast<size_t>((offset + begin) / block_nbytes)]) {
      return offset + begin;
    }
  }
  return -1;
}

void BlockSummer::append(Bytes bytes) {
  sums_.file_nbytes += ssize(bytes);
  while (!bytes.empty()) {
    const int64_t nbytes = std::min(ssize(bytes), sums_.block_nbytes - filled_);
    const Bytes chunk = slice(bytes, 0, nbytes);
    bytes = bytes.subspan(chunk.size());
    if (nbytes == sums_.block_nbytes) {
      sums_.sums.push_back(xxh3(chunk));
      continue;
    }
    block_.update(chunk);
    filled_ += nbytes;
    if (filled_ < sums_.block_nbytes) continue;
    sums_.sums.push_back(block_.finish());
    filled_ = 0;
  }
}

BlockSums BlockSummer::finish() {
  if (filled_ > 0) sums_.sums.push_back(block_.finish());
  filled_ = 0;
  return std::move(sums_);
}

}  // namespace torch_ckpt
