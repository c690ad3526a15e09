#pragma once

// The record `data.pkl` of a stored tensor: which dtype, sizes and strides it has, and which record
// holds its storage.
//
// `write_tensor_pickle` writes what torch.load(weights_only=True) accepts; `parse_tensor_pickle`
// reads what torch.save has written for a plain strided tensor, in whatever protocol. Neither runs
// Python. Called by `zip_frame`.

#include <cstdint>
#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/strided.h"

namespace torch_ckpt {

inline constexpr int kMaxDims = 64;

// Room for the longest pickle `write_tensor_pickle` can write.
inline constexpr int64_t kMaxTensorPickleNbytes = 2048;

// Describes a contiguous tensor whose storage is the record "data/0". Returns how many bytes of
// `out` it has filled. Requires: out.size() >= kMaxTensorPickleNbytes.
// Errors: kInvalidArgument for a negative size, sizes whose product overflows (a 0 counting as 1),
// or more than kMaxDims of them.
Result<int64_t> write_tensor_pickle(DType dtype, std::span<const int64_t> sizes, MutableBytes out);

// A longer pickle does not describe one tensor.
inline constexpr int64_t kMaxParsedPickleNbytes = 65536;

// What a pickle says of a tensor. Numbers are not negative, there are as many strides as sizes, and
// sizes and storage are of a length in bytes that fits an int64_t. Whether the elements lie inside
// the storage is not checked.
struct PickledTensor {
  DType dtype = DType::kUInt8;
  Dims sizes;
  Dims strides;                // In elements.
  int64_t storage_offset = 0;  // In elements.
  int64_t storage_nbytes = 0;
  std::string_view storage_key;  // The storage is the record "data/<key>". Points into the pickle.
};

// Errors: kCorruption for bytes that end too early, are no opcodes or contradict themselves;
// kUnsupported for any other pickle that is not the one of a plain strided tensor: torch must read
// it.
Result<PickledTensor> parse_tensor_pickle(Bytes pickle);

}  // namespace torch_ckpt
