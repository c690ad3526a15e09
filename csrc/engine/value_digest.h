#pragma once

// Digests of tensor values, by which ranks find out whether their replicas are equal.
//
// A digest depends on the elements in row-major order alone, not on strides or addresses. It
// compares bits: NaNs with equal bits are equal, and 0.0 differs from -0.0. Like XXH3, it detects
// differences that happen, not ones that are forged.

#include <cstdint>
#include <span>
#include <vector>

#include "engine/tensor_view.h"

namespace torch_ckpt {

// The sample of a tensor: blocks at about equal distances. The first block has the first element,
// and the last one the last. A tensor of at most kSampleBlocks blocks is its own sample.
inline constexpr int64_t kSampleBlocks = 16;
inline constexpr int64_t kSampleBlockNbytes = 512;

// No value has this digest.
inline constexpr uint64_t kUnknownDigest = 0;

// The sampled elements: [first, first + count) for each `first`, in row-major order.
struct Sample {
  std::vector<int64_t> firsts;
  int64_t count = 0;
};

// Requires: numel >= 0, and `itemsize` divides kSampleBlockNbytes.
Sample sample_of(int64_t numel, int64_t itemsize);

// Returns the digest of each tensor: of its sample, or of all elements if `full`. Uses up to
// `threads` threads.
// Requires: all tensors are in host memory.
std::vector<uint64_t> value_digests(std::span<const TensorView* const> tensors, bool full,
                                    int threads);

}  // namespace torch_ckpt
