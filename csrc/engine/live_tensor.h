#pragma once

// LiveTensor: a strided view of a tensor of the training process. The view does not own the memory.
// The caller owns the memory until every job that accesses the tensor has ended.

#include <string>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/strided.h"
#include "device/device.h"

namespace torch_ckpt {

struct LiveTensor {
  std::string name;  // FQN, for messages.
  DType dtype = DType::kUInt8;
  Dims sizes;
  Dims strides;  // In bytes.
  std::byte* data = nullptr;
  const Device* device = &cpu_device();
};

// Whether the elements lie in row-major order without gaps. Strides are in bytes.
bool is_contiguous(const Dims& sizes, const Dims& strides, int64_t itemsize);
bool is_contiguous(const LiveTensor& tensor);

// Packs the elements [begin, end) of a strided tensor in host memory into `out`, without gaps.
// `begin` and `end` count elements in row-major order.
void pack_elements(const LiveTensor& tensor, int64_t begin, int64_t end, MutableBytes out);

}  // namespace torch_ckpt
