#pragma once

// What tensors of GPUs are loaded and staged by.

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

// What tensors lie on; made as the first tensor on each comes. Safe to use from any thread.
class Devices {
 public:
  // A live tensor of this view, for as long as this exists. Raises where its GPU cannot be used.
  LiveTensor live(const TensorView& view, std::string_view name) {
    LiveTensor out = to_live(view);
    if (view.gpu < 0) return out;
    const auto device = without_gil([&] { return made(view.gpu, view.stream); });
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
  Result<const Device*> made(int gpu, uint64_t stream) {
    const std::scoped_lock lock(mutex_);
    std::unique_ptr<Device>& device = gpus_[{gpu, stream}];
    if (device == nullptr) {
      // For two windows: what is read at a time, or a little more.
      constexpr int64_t kWindowNbytes = int64_t{4} << 20;
      ASSIGN_OR_RETURN(auto cuda, CudaDevice::make(gpu, kWindowNbytes));
      const auto after = reinterpret_cast<CudaStream>(stream);
      device = std::make_unique<CudaTensors>(std::move(cuda), after);
    }
    return device.get();
  }

  std::mutex mutex_;  // Guards what follows. Not taken by whoever holds the GIL.
  std::map<std::pair<int, uint64_t>, std::unique_ptr<Device>> gpus_;
};

}  // namespace torch_ckpt
