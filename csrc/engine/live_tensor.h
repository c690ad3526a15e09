#pragma once

// A tensor of the training process, as the engine sees it: a view of memory that somebody else
// keeps alive for as long as a job may touch it.

#include <string>

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

}  // namespace torch_ckpt
