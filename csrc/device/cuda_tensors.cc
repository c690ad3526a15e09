#include <utility>

#include "device/cuda_device.h"

namespace torch_ckpt {

Result<std::unique_ptr<DeviceEvent>> CudaTensors::unpack(std::span<const TensorCopy> copies,
                                                         Bytes buffer) const {
  const PackOptions options = {.staging_nbytes = ssize(buffer),
                               .window_nbytes = device_->window_nbytes()};
  ASSIGN_OR_RETURN(PackPlan made, plan_pack(PackDirection::kUnpack, copies, options));
  const std::scoped_lock lock(mutex_);
  // The tables are freed in stream order, so the plan need not outlive the copies.
  ASSIGN_OR_RETURN(const auto plan, device_->upload(std::move(made)));
  return device_->unpack_from_host(*plan, buffer, after_);
}

Result<std::unique_ptr<DeviceEvent>> CudaTensors::pack(std::span<const TensorCopy> copies,
                                                       MutableBytes buffer) const {
  const std::scoped_lock lock(mutex_);
  auto started = start_pack(copies, buffer, PackOptions().direct_nbytes);
  if (started.ok()) return started;
  auto without_windows = start_pack(copies, buffer, 1);
  return without_windows.ok() ? std::move(without_windows) : std::move(started);
}

// Requires: the caller owns `mutex_`.
Result<std::unique_ptr<DeviceEvent>> CudaTensors::start_pack(std::span<const TensorCopy> copies,
                                                             MutableBytes buffer,
                                                             int64_t direct_nbytes) const {
  const PackOptions options = {.staging_nbytes = ssize(buffer),
                               .window_nbytes = device_->window_nbytes(),
                               .direct_nbytes = direct_nbytes};
  ASSIGN_OR_RETURN(PackPlan made, plan_pack(PackDirection::kPack, copies, options));
  ASSIGN_OR_RETURN(const auto plan, device_->upload(std::move(made)));
  return device_->pack_to_host(*plan, buffer, after_);
}

}  // namespace torch_ckpt
