#pragma once

// Devices: creates the GPU devices that copy tensors in loads and in staging.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/tensor_view.h"
#include "device/cuda_device.h"
#include "engine/save/snapshot.h"

namespace torch_ckpt {

// One Device per GPU and stream, created for the first tensor on it. Safe to use from any thread.
class Devices {
 public:
  // Returns a live tensor for a view, valid for the lifetime of this object. Raises if the GPU of
  // the tensor is unusable.
  LiveTensor live(const TensorView& view, std::string_view name) {
    LiveTensor out = to_live(view);
    if (view.gpu < 0) return out;
    const auto device = without_gil([&] { return device_of(view.gpu, view.stream); });
    if (!device.ok()) {
      raise_if_error(
          Status(device.status().code(),
                 str_cat("cannot use the GPU of '", name, "': ", device.status().message()),
                 device.status().error_number()));
    }
    out.device = *device;
    return out;
  }

 private:
  Result<const Device*> device_of(int gpu, uint64_t stream) {
    const std::scoped_lock lock(mutex_);
    std::unique_ptr<Device>& device = gpus_[{gpu, stream}];
    if (device == nullptr) {
      // A window covers one read; the device has two windows.
      constexpr int64_t kWindowNbytes = int64_t{4} << 20;
      ASSIGN_OR_RETURN(auto cuda, CudaDevice::make(gpu, kWindowNbytes));
      const auto after = reinterpret_cast<CudaStream>(stream);
      device = std::make_unique<CudaTensors>(std::move(cuda), after);
    }
    return device.get();
  }

  std::mutex mutex_;  // Guards gpus_. Acquired only without the GIL, which avoids a deadlock.
  std::map<std::pair<int, uint64_t>, std::unique_ptr<Device>> gpus_;
};

}  // namespace torch_ckpt
