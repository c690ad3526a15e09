#pragma once

// What a subscriber does with encoded blocks: it merges those of several versions into a mask, and
// then applies the mask to a tensor. A mask is the XOR of the tensor's values in two versions, in
// the row-major order of the tensor, so applying it twice changes nothing.

#include <cstdint>

#include "base/bytes.h"
#include "base/status.h"
#include "engine/live_tensor.h"
#include "geometry/box.h"

namespace torch_ckpt {

// Encoded blocks of one stored box of one version.
struct StoredBlocks {
  Box box;
  int64_t itemsize = 1;
  int64_t first_block = 0;
  Bytes table;    // One row for each block from `first_block`.
  Bytes payload;  // The encoded blocks of these rows, one after another.
};

// Merges the blocks into the mask of the elements in `box`, with up to `threads` threads. The mask
// has the blocks of the versions before. Checks the sum of each encoded block. With a target, which
// has the values of `box` before the first of these versions, also checks the digests of each block
// that is entirely in `box`, before and after it is merged. An empty mask is as one of zeros: the
// blocks are only checked.
// Requires: the target is in host memory.
// Errors, after which the mask is undefined: kInvalidArgument if sizes do not match; kMismatch if
// the target has other values than the version before; kCorruption if the blocks are damaged.
Status merge_blocks(MutableBytes mask, const LiveTensor* target, const Box& box,
                    const StoredBlocks& blocks, int threads);

// Computes the XOR of a tensor in host memory and a mask in place, with up to `threads` threads.
// Errors: kInvalidArgument if the mask does not have the tensor's length; then nothing has changed.
Status apply_mask(const LiveTensor& target, Bytes mask, int threads);

}  // namespace torch_ckpt
