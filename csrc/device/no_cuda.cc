// What a build without CUDA has of it.

#if !TORCH_CKPT_HAVE_CUDA

#include "device/cuda_device.h"

namespace torch_ckpt {

Status cuda_available() { return unsupported("this build of torch-ckpt has no CUDA"); }

Result<std::shared_ptr<void>> pin(MutableBytes, int) { return cuda_available(); }

Result<Memory> PinnedMemorySource::allocate(int64_t) { return cuda_available(); }

Result<Memory> GpuMemorySource::allocate(int64_t) { return cuda_available(); }

Result<std::unique_ptr<CudaDevice>> CudaDevice::make(int, int64_t) { return cuda_available(); }

Result<std::unique_ptr<CudaTensors>> CudaTensors::make(std::unique_ptr<CudaDevice>, CudaStream,
                                                       int64_t) {
  return cuda_available();
}

Status CudaTensors::copy(const StridedCopy&, const std::byte*, std::byte*) const {
  return cuda_available();
}

Status CudaTensors::warm_up() const { return cuda_available(); }

Result<uint32_t> CudaTensors::copy_and_checksum(Bytes, MutableBytes, uint32_t) const {
  return cuda_available();
}

Result<std::unique_ptr<DeviceEvent>> CudaTensors::unpack(std::span<const TensorCopy>, Bytes) const {
  return cuda_available();
}

Result<std::unique_ptr<DeviceEvent>> CudaTensors::pack(std::span<const TensorCopy>,
                                                       MutableBytes) const {
  return cuda_available();
}

}  // namespace torch_ckpt

#endif  // !TORCH_CKPT_HAVE_CUDA
