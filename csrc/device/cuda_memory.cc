#if TORCH_CKPT_HAVE_CUDA

#include <utility>

#include "device/cuda_call.h"
#include "device/cuda_device.h"

namespace torch_ckpt {

Status cuda_available() {
  int count = 0;
  const Status status = cuda_status(cudaGetDeviceCount(&count), "find a GPU");
  if (!status.ok()) return unsupported(status.message());
  if (count == 0) return unsupported("cannot find a GPU: the driver has none");
  return ok_status();
}

Result<std::shared_ptr<void>> pin(MutableBytes bytes, int ordinal) {
  RETURN_IF_ERROR(cuda_available());
  const CurrentDevice current(ordinal);
  RETURN_IF_ERROR(current.status());
  // Portable: pinned for all GPUs, not only the current one.
  RETURN_IF_ERROR(
      cuda_status(cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterPortable),
                  str_cat("pin ", bytes.size(), " bytes")));
  return std::shared_ptr<void>(bytes.data(), [ordinal](void* data) {
    const CurrentDevice unpinning(ordinal);
    // Fails at process exit, when CUDA is already shut down and nothing is pinned any more.
    if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
  });
}

Result<Memory> PinnedMemorySource::allocate(int64_t nbytes) {
  ASSIGN_OR_RETURN(Memory heap, HeapMemorySource().allocate(nbytes));
  RETURN_IF_ERROR(heap.populate());
  const MutableBytes bytes = heap.bytes();
  ASSIGN_OR_RETURN(std::shared_ptr<void> pinned, pin(bytes, ordinal_));
  auto block = std::make_shared<Memory>(std::move(heap));
  const auto release = [block, pinned]() mutable {
    pinned.reset();  // Unpin before the memory is freed.
    block.reset();
  };
  return Memory(bytes, release, /*populated=*/true);
}

}  // namespace torch_ckpt

#endif  // TORCH_CKPT_HAVE_CUDA
