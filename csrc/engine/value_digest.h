#pragma once

// Digests of tensor values, by which ranks find out whether their replicas are equal, and a save
// finds out what has not changed since an older one.
//
// A digest depends on the elements in row-major order alone, not on strides or addresses. It
// compares bits: NaNs with equal bits are equal, and 0.0 differs from -0.0. Like XXH3, it detects
// differences that happen, not ones that are forged.

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/xxh3.h"
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

// Returns the digest of each tensor: of its sample, or the low half of that of all elements if
// `full`. Uses up to `threads` threads.
// Requires: all tensors are in host memory.
std::vector<uint64_t> value_digests(std::span<const TensorView* const> tensors, bool full,
                                    int threads);

// Returns the digest of all elements of each tensor: the XXH3-128 of the XXH3-128 of each
// kDigestPieceNbytes of them, so that several threads can share a long tensor. Uses up to `threads`
// threads. Requires: all tensors are in host memory.
std::vector<Digest128> full_digests(std::span<const TensorView* const> tensors, int threads);

inline constexpr int64_t kDigestPieceNbytes = int64_t{8} << 20;

// The same digest of elements that arrive in order, in chunks of any size.
class DigestStream {
 public:
  void update(Bytes bytes);

  // Returns the digest of all bytes since the last `finish`, and starts over.
  Digest128 finish();

 private:
  void end_piece();

  Xxh3Stream piece_;
  int64_t filled_ = 0;  // Length of the piece so far.
  std::vector<Digest128> pieces_;
};

}  // namespace torch_ckpt
