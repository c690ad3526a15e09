#pragma once

// Tensors in GPU memory: execution of plans (pack_plan.h) on a GPU, and pinned host memory.
//
// All functions exist in every build. Without CUDA or a driver they return an error. All CUDA
// errors become statuses that contain CUDA's name of the error. After an error that destroys the
// GPU's context, every later call fails with the same error.

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/memory.h"
#include "base/status.h"
#include "device/device.h"
#include "device/pack_plan.h"

struct CUstream_st;

namespace torch_ckpt {

// Same as cudaStream_t of CUDA and torch; null is the default stream.
using CudaStream = CUstream_st*;

// Returns OK if a GPU is available, else kUnsupported with the reason.
Status cuda_available();

// Pins existing host memory, e.g. shared memory, so that GPUs can copy from and to it directly. The
// memory stays pinned until the last copy of the returned pointer is destroyed. `ordinal` is any
// GPU that the process already uses; the memory is pinned for all GPUs.
// Requires: the memory outlives the returned pointer.
// Errors: kUnsupported as for `cuda_available`.
Result<std::shared_ptr<void>> pin(MutableBytes bytes, int ordinal);

// Allocates pinned memory: heap blocks that are then pinned. Unlike memory from CUDA's allocator, a
// heap block has huge pages and can be registered with io_uring, so direct I/O stays fast.
class PinnedMemorySource : public MemorySource {
 public:
  explicit PinnedMemorySource(int ordinal) : ordinal_(ordinal) {}
  Result<Memory> allocate(int64_t nbytes) override;

 private:
  const int ordinal_;
};

// A plan with its tables in GPU memory. Must not outlive its CudaDevice.
class CudaPlan {
 public:
  virtual ~CudaPlan() = default;
  virtual const PackPlan& plan() const = 0;
};

// One GPU with two streams and two buffers: one stream copies a window while the other packs or
// unpacks the next. All work waits for earlier work on the caller's stream, which produces the
// tensors. Calls execute in order.
//
// A call that returns an event only starts its work. Tensors and host memory must stay valid and
// unchanged until the event. If a call fails, none of its work is running when the error is
// returned.
//
// Used by one thread at a time.
class CudaDevice {
 public:
  // `window_nbytes` is the size of each of the two buffers, which are allocated at first use.
  // Errors: kUnsupported as for `cuda_available`; kInvalidArgument if the GPU does not exist.
  static Result<std::unique_ptr<CudaDevice>> make(
      int ordinal, int64_t window_nbytes = PackOptions().window_nbytes);

  virtual ~CudaDevice() = default;  // Waits for all started work.

  virtual int ordinal() const = 0;
  virtual int64_t window_nbytes() const = 0;

  // Copies a plan's tables to the GPU. kInvalidArgument if a window is larger than the buffers.
  virtual Result<std::unique_ptr<CudaPlan>> upload(PackPlan plan) = 0;

  // Packs tensors into `image`, the whole staging buffer of the plan, in pinned memory. Short gaps
  // between copies become zero, so the caller writes frames after the event. `after` is the stream
  // that last wrote the tensors.
  virtual Result<std::unique_ptr<DeviceEvent>> pack_to_host(const CudaPlan& plan,
                                                            MutableBytes image,
                                                            CudaStream after) = 0;

  // Unpacks `piece`, the whole staging buffer of the plan, in pinned memory.
  virtual Result<std::unique_ptr<DeviceEvent>> unpack_from_host(const CudaPlan& plan, Bytes piece,
                                                                CudaStream after) = 0;

  // Computes products; see Device::multiply. `codes` are in pinned memory.
  virtual Result<std::unique_ptr<DeviceEvent>> multiply(const ProductTable& table, Bytes codes,
                                                        std::span<const float> values,
                                                        std::span<const float> scales,
                                                        CudaStream after) = 0;
};

// The Device interface for GPU tensors. `pack` and `unpack` make a plan of their copies and start
// it.
class CudaTensors : public Device {
 public:
  // `after` is the stream that last used the tensors. Requires: no other user of `device`.
  CudaTensors(std::unique_ptr<CudaDevice> device, CudaStream after)
      : device_(std::move(device)), after_(after), buffers_(device_->ordinal()) {}

  bool is_host() const override { return false; }
  MemorySource& buffers() const override { return buffers_; }

  // Also accepts unpinned memory, but then blocks the calling thread.
  Result<std::unique_ptr<DeviceEvent>> unpack(std::span<const TensorCopy> copies,
                                              Bytes buffer) const override;

  Result<std::unique_ptr<DeviceEvent>> multiply(const ProductTable& table, Bytes codes,
                                                std::span<const float> values,
                                                std::span<const float> scales) const override {
    const std::scoped_lock lock(mutex_);
    return device_->multiply(table, codes, values, scales, after_);
  }

  // Also accepts unpinned memory, but then blocks the calling thread. If the GPU has no free memory
  // for windows, copies contiguous tensors one by one.
  Result<std::unique_ptr<DeviceEvent>> pack(std::span<const TensorCopy> copies,
                                            MutableBytes buffer) const override;

  Result<std::shared_ptr<void>> pin(MutableBytes bytes) const override {
    return torch_ckpt::pin(bytes, device_->ordinal());
  }

 private:
  Result<std::unique_ptr<DeviceEvent>> start_pack(std::span<const TensorCopy> copies,
                                                  MutableBytes buffer, int64_t direct_nbytes) const;

  mutable std::mutex mutex_;  // Guards `device_`.
  const std::unique_ptr<CudaDevice> device_;
  const CudaStream after_;
  mutable PinnedMemorySource buffers_;
};

}  // namespace torch_ckpt
