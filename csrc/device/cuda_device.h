#pragma once

// Tensors in the memory of a GPU: how plans (pack_plan.h) run there, and memory that a GPU
// reaches by itself.
//
// All of it exists in every build: one without CUDA, or on a machine without a driver, says so by a
// status. No error of CUDA is anything else than a status, and each names CUDA's own error. After
// one that means that the GPU's context is lost, whatever is asked of it fails with the same.

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

// As CUDA's cudaStream_t, and as torch gives it; null is the default stream.
using CudaStream = CUstream_st*;

// OK where there is a GPU to use; else kUnsupported and why not.
Status cuda_available();

// Locks memory in place, so that GPUs copy from and to it by themselves, until the last copy of
// what is returned is gone. For memory that was not made for it: shared memory. `ordinal`: a GPU
// that the process uses anyway. All will do: the memory is pinned for each of them.
// Requires: the memory is there as long. kUnsupported as `cuda_available`.
Result<std::shared_ptr<void>> pin(MutableBytes bytes, int ordinal);

// Pinned memory of this process. It is a heap block that was pinned, and not what CUDA would
// allocate, so that it is as good for direct I/O: in huge pages, and registered with the kernel.
class PinnedMemorySource : public MemorySource {
 public:
  explicit PinnedMemorySource(int ordinal) : ordinal_(ordinal) {}
  Result<Memory> allocate(int64_t nbytes) override;

 private:
  const int ordinal_;
};

// A plan whose tables lie in the memory of the GPU. Must not outlive its CudaDevice.
class CudaPlan {
 public:
  virtual ~CudaPlan() = default;
  virtual const PackPlan& plan() const = 0;
};

// One GPU, with two streams of its own: one copies a window while the other packs or unpacks the
// next, in two buffers by turns. All work waits for what is on the caller's stream, where tensors
// are made, and begins in the order in which it was asked for.
//
// What returns an event has only been started: tensors, and memory of the host, must be there and
// unchanged until that event. Where starting fails, nothing is going on when the error is returned.
//
// Used by one thread at a time.
class CudaDevice {
 public:
  // `window_nbytes`: of each of the two buffers, which are allocated when they are first used.
  // kUnsupported as `cuda_available`; kInvalidArgument where there is no such GPU.
  static Result<std::unique_ptr<CudaDevice>> make(
      int ordinal, int64_t window_nbytes = PackOptions().window_nbytes);

  virtual ~CudaDevice() = default;  // Waits for everything that was started.

  virtual int ordinal() const = 0;
  virtual int64_t window_nbytes() const = 0;

  // kInvalidArgument where a window of the plan is larger than the buffers.
  virtual Result<std::unique_ptr<CudaPlan>> upload(PackPlan plan) = 0;

  // Packs tensors into `image`, the whole staging buffer of the plan, in pinned memory. Bytes
  // between copies that are not far apart are zero afterwards, so frames are to be written after
  // the event. `after`: the stream that the tensors were last written on.
  virtual Result<std::unique_ptr<DeviceEvent>> pack_to_host(const CudaPlan& plan,
                                                            MutableBytes image,
                                                            CudaStream after) = 0;

  // Unpacks `piece`, the whole staging buffer of the plan, in pinned memory.
  virtual Result<std::unique_ptr<DeviceEvent>> unpack_from_host(const CudaPlan& plan, Bytes piece,
                                                                CudaStream after) = 0;
};

// Tensors in the memory of a GPU, as the engine has devices. `pack` and `unpack` make a plan of
// their copies and start it.
class CudaTensors : public Device {
 public:
  // `after`: as above, of every copy. Requires: nobody else uses `device` meanwhile.
  CudaTensors(std::unique_ptr<CudaDevice> device, CudaStream after)
      : device_(std::move(device)), after_(after), buffers_(device_->ordinal()) {}

  bool is_host() const override { return false; }
  MemorySource& buffers() const override { return buffers_; }

  // From memory that is not pinned it copies as well, but has the calling thread wait.
  Result<std::unique_ptr<DeviceEvent>> unpack(std::span<const TensorCopy> copies,
                                              Bytes buffer) const override;

  // To memory that is not pinned: likewise. Where training has left no memory for windows, tensors
  // that are contiguous are copied one by one.
  Result<std::unique_ptr<DeviceEvent>> pack(std::span<const TensorCopy> copies,
                                            MutableBytes buffer) const override;

  Result<std::shared_ptr<void>> pin(MutableBytes bytes) const override {
    return torch_ckpt::pin(bytes, device_->ordinal());
  }

 private:
  Result<std::unique_ptr<DeviceEvent>> start_pack(std::span<const TensorCopy> copies,
                                                  MutableBytes buffer, int64_t direct_nbytes) const;

  mutable std::mutex mutex_;  // Guards the device.
  const std::unique_ptr<CudaDevice> device_;
  const CudaStream after_;
  mutable PinnedMemorySource buffers_;
};

}  // namespace torch_ckpt
