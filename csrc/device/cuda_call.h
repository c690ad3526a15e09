#pragma once

// CUDA calls with Status results, and RAII owners of CUDA objects. Only for files in this directory
// that are compiled with CUDA.

#include <cuda_runtime_api.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace torch_ckpt {

// Makes the status of a CUDA error: "cannot <what>: cudaErrorX (description by CUDA)". A missing
// driver or GPU is kUnsupported. Lack of memory is kStorage with ENOMEM, as for the heap. An
// invalid GPU number is kInvalidArgument. All other errors are kInternal.
inline Status cuda_status(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return ok_status();
  cudaGetLastError();  // Clear the error: the next launch would report it again.
  const std::string message =
      str_cat("cannot ", what, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
  switch (error) {
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNotSupported:
      return Status(StatusCode::kUnsupported, message);
    case cudaErrorMemoryAllocation:
      return Status(StatusCode::kStorage, message, ENOMEM);
    case cudaErrorInvalidDevice:
      return Status(StatusCode::kInvalidArgument, message);
    default:
      return Status(StatusCode::kInternal, message);
  }
}

// Returns whether this process uses a GPU: whether the GPU's primary context is active.
inline bool is_in_use(int ordinal) {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  static const auto get_state = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) cudaGetLastError();
    return reinterpret_cast<GetState>(found);
  }();
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(ordinal, &flags, &active) == 0 && active != 0;
}

// Makes a GPU the current device of this thread during the object's lifetime. Every CUDA call needs
// one: the default is GPU 0, where the first call would allocate hundreds of MiB for a context. For
// the same reason, the destructor does not restore a GPU that this process does not use.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = ordinal;
    if (before_ != ordinal) restore_ = is_in_use(before_);
    status_ = cuda_status(cudaSetDevice(ordinal), str_cat("use GPU ", ordinal));
  }
  ~CurrentDevice() {
    if (restore_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  const Status& status() const { return status_; }

 private:
  int before_ = 0;
  bool restore_ = false;
  Status status_;
};

// An owned stream or event. Move-only.
template <typename Handle, cudaError_t (*kDestroy)(Handle)>
class CudaOwned {
 public:
  CudaOwned() = default;
  explicit CudaOwned(Handle handle) : handle_(handle) {}
  CudaOwned(CudaOwned&& other) noexcept { *this = std::move(other); }
  CudaOwned& operator=(CudaOwned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaOwned() {
    if (handle_ != nullptr) kDestroy(handle_);
  }
  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};

using OwnedStream = CudaOwned<cudaStream_t, cudaStreamDestroy>;
using OwnedEvent = CudaOwned<cudaEvent_t, cudaEventDestroy>;

// Makes a stream that does not synchronize with the default stream.
inline Result<OwnedStream> make_stream() {
  cudaStream_t stream = nullptr;
  RETURN_IF_ERROR(
      cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream"));
  return OwnedStream(stream);
}

// Makes an event without timing. A thread that waits for it sleeps.
inline Result<OwnedEvent> make_event() {
  cudaEvent_t event = nullptr;
  const unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync;
  RETURN_IF_ERROR(cuda_status(cudaEventCreateWithFlags(&event, flags), "make an event"));
  return OwnedEvent(event);
}

}  // namespace torch_ckpt
