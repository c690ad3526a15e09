// The functions of cuda_device.h in a build without CUDA.

#if !TORCH_CKPT_HAVE_CUDA

#include "device/cuda_device.h"

namespace torch_ckpt {

Status cuda_available() { return unsupported("this build of torch-ckpt has no CUDA"); }

Result<std::shared_ptr<void>> pin(MutableBytes, int) { return cuda_available(); }

Result<Memory> PinnedMemorySource::allocate(int64_t) { return cuda_available(); }

Result<std::unique_ptr<CudaDevice>> CudaDevice::make(int, int64_t) { return cuda_available(); }

}  // namespace torch_ckpt

#endif  // !TORCH_CKPT_HAVE_CUDA
