#pragma once

// A tensor of the training process, as the engine sees it: a view of memory that somebody else
// keeps alive for as long as a job may touch it.

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

// Whether its elements lie one behind the other, in row-major order.
bool is_contiguous(const LiveTensor& tensor);

// Packs the bytes that the elements [begin, end) of a strided tensor in ordinary memory, counted in
// row-major order, take one after another.
void pack_elements(const LiveTensor& tensor, int64_t begin, int64_t end, MutableBytes out);

}  // namespace torch_ckpt
