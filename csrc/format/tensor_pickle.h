#pragma once

// The record `data.pkl` of a stored tensor. It describes dtype, sizes and strides, and names the
// record with the storage.
//
// `write_tensor_pickle` writes a pickle that torch.load(weights_only=True) accepts.
// `parse_tensor_pickle` parses the pickle of a plain strided tensor that torch.save wrote, in any
// protocol. Neither runs Python. Called by `zip_frame`.

#include <cstdint>
#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/strided.h"

namespace torch_ckpt {

inline constexpr int kMaxDims = 64;

// Upper bound of the length of a pickle that `write_tensor_pickle` writes.
inline constexpr int64_t kMaxTensorPickleNbytes = 2048;

// Writes the pickle of a contiguous tensor whose storage is the record "data/0". Returns the number
// of bytes written to `out`. Requires: out.size() >= kMaxTensorPickleNbytes.
// Errors: kInvalidArgument for a negative size, more than kMaxDims sizes, or sizes whose product
// overflows (a size of 0 counts as 1).
Result<int64_t> write_tensor_pickle(DType dtype, std::span<const int64_t> sizes, MutableBytes out);

// Upper bound of the length of a pickle that `parse_tensor_pickle` parses.
inline constexpr int64_t kMaxParsedPickleNbytes = 65536;

// A tensor as its pickle describes it. No number is negative, `sizes` and `strides` have the same
// length, and the lengths in bytes of tensor and storage fit an int64_t. The elements may reach
// beyond the storage.
struct PickledTensor {
  DType dtype = DType::kUInt8;
  Dims sizes;
  Dims strides;                // In elements.
  int64_t storage_offset = 0;  // In elements.
  int64_t storage_nbytes = 0;
  std::string_view storage_key;  // Key of the record "data/<key>"; points into the pickle.
};

// Errors: kCorruption for a truncated or contradictory pickle or an unknown opcode; kUnsupported
// for any other pickle that does not describe one plain strided tensor, which torch must read.
Result<PickledTensor> parse_tensor_pickle(Bytes pickle);

}  // namespace torch_ckpt
