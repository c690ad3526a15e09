#pragma once

// The difference between a snapshot of a box and its live values, which a publisher takes while
// training stops, and compresses later.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "codec/block.h"
#include "codec/raw_block.h"
#include "engine/live_tensor.h"
#include "engine/publish/difference_memory.h"

namespace torch_ckpt {

// Encoded blocks one after another, and a row of each block, also of unchanged ones.
struct EncodedDifference {
  std::vector<std::byte> payload;
  std::vector<std::byte> table;
};

// The raw difference of adjacent blocks of a box. Used by one thread at a time.
class BoxDifference {
 public:
  // The host memory that the difference takes. Differences may share chunks; each counts its part.
  int64_t nbytes() const;

  // The length of all changed elements.
  int64_t changed_nbytes() const;

  // Compresses the blocks with up to `threads` threads, and releases the memory.
  // Errors: those of encode_block. A second call returns kInvalidArgument.
  Result<EncodedDifference> encode(int threads);

 private:
  friend Result<BoxDifference> take_difference(const LiveTensor& snapshot, const LiveTensor& source,
                                               int64_t first_block, int64_t end_block,
                                               std::span<uint64_t> digests, int threads,
                                               const std::shared_ptr<DifferenceMemory>& memory);

  struct Block {
    RawBlock raw;
    const std::byte* streams = nullptr;
    uint64_t base = 0;
    uint64_t result = 0;
  };
  class Taking;

  static Status encode_run(std::span<const Block> blocks, EncodedDifference& out);

  std::vector<Block> blocks_;
  std::vector<std::shared_ptr<DifferenceChunk>> chunks_;
  bool is_encoded_ = false;
};

// Takes the difference of the blocks [first_block, end_block) with up to `threads` threads, and
// brings these blocks of the snapshot and their digests up to date. The difference is in `memory`.
// Requires: both tensors are in host memory, and do not overlap.
// Errors: kInvalidArgument if the tensors differ in dtype or sizes, if the snapshot has gaps, or if
// `digests` does not have one digest for each block of the snapshot; then nothing has changed.
// kStorage if memory is short; then any of the blocks may be up to date.
Result<BoxDifference> take_difference(const LiveTensor& snapshot, const LiveTensor& source,
                                      int64_t first_block, int64_t end_block,
                                      std::span<uint64_t> digests, int threads,
                                      const std::shared_ptr<DifferenceMemory>& memory);

// Copies all values to the snapshot, and computes the digest of each block. Errors: as above.
Status take_snapshot(const LiveTensor& snapshot, const LiveTensor& source,
                     std::span<uint64_t> digests, int threads);

}  // namespace torch_ckpt
