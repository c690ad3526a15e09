#pragma once

// What a GPU's tensors are loaded by, and pieces that go from GPU to GPU are held by.

#include <cstdint>
#include <memory>
#include <utility>

#include "device/cuda_device.h"

namespace torch_ckpt {

// `stream`: torch's current one.
inline Result<std::unique_ptr<CudaTensors>> make_gpu_tensors(int ordinal, uint64_t stream) {
  // For two windows: what is read at a time, or a little more.
  constexpr int64_t kWindowNbytes = int64_t{4} << 20;
  ASSIGN_OR_RETURN(auto gpu, CudaDevice::make(ordinal, kWindowNbytes));
  return CudaTensors::make(std::move(gpu), reinterpret_cast<CudaStream>(stream));
}

}  // namespace torch_ckpt
