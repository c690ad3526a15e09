#if TORCH_CKPT_HAVE_CUDA

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc.h"
#include "device/cuda_call.h"
#include "device/cuda_device.h"

namespace torch_ckpt {
namespace {

Result<bool> on_gpu(const std::byte* address) {
  cudaPointerAttributes attributes = {};
  RETURN_IF_ERROR(
      cuda_status(cudaPointerGetAttributes(&attributes, address), "find out where memory lies"));
  return attributes.type == cudaMemoryTypeDevice;
}

// Of a buffer that holds the copied elements one behind the other.
Dims packed_strides(const StridedCopy& copy) {
  Dims strides = contiguous_strides(copy.sizes);
  for (int64_t& stride : strides) stride *= copy.itemsize;
  return strides;
}

}  // namespace

Result<std::unique_ptr<CudaTensors>> CudaTensors::make(std::unique_ptr<CudaDevice> device,
                                                       CudaStream after, int64_t buffer_nbytes) {
  if (buffer_nbytes <= 0) return invalid_argument("a buffer of ", buffer_nbytes, " bytes");
  return std::unique_ptr<CudaTensors>(new CudaTensors(std::move(device), after, buffer_nbytes));
}

Status CudaTensors::copy(const StridedCopy& copy, const std::byte* src, std::byte* dst) const {
  const auto numel = checked_numel(copy.sizes);
  if (numel && *numel == 0) return ok_status();
  const std::scoped_lock lock(mutex_);
  const CurrentDevice current(device_->ordinal());
  ASSIGN_OR_RETURN(const bool from_gpu, on_gpu(src));
  ASSIGN_OR_RETURN(const bool to_gpu, on_gpu(dst));
  if (!from_gpu && !to_gpu) return cpu_device().copy(copy, src, dst);
  if (from_gpu && to_gpu) return invalid_argument("a copy is within the memory of GPUs");
  const PackDirection direction = from_gpu ? PackDirection::kPack : PackDirection::kUnpack;
  if (buffer_.nbytes() == 0) {
    ASSIGN_OR_RETURN(buffer_, buffers_.allocate(buffer_nbytes_));
  }
  return copy_parts(simplified(copy), direction, src, dst);
}

Status CudaTensors::warm_up() const {
  ASSIGN_OR_RETURN(const Memory there, memory_.allocate(1));
  std::byte here{};
  const StridedCopy one = {.sizes = {1}, .src_strides = {1}, .dst_strides = {1}};
  RETURN_IF_ERROR(copy(one, there.bytes().data(), &here));
  return copy(one, &here, there.bytes().data());
}

// Cuts the outermost dimension until the buffer holds what is left.
Status CudaTensors::copy_parts(const StridedCopy& copy, PackDirection direction,
                               const std::byte* src, std::byte* dst) const {
  const auto numel = checked_numel(copy.sizes);
  const auto nbytes = numel ? checked_mul(*numel, copy.itemsize) : std::nullopt;
  if (!nbytes) return invalid_argument(to_string(copy.sizes), " is no copy");
  if (*nbytes <= buffer_.nbytes()) return copy_part(copy, direction, src, dst);
  if (copy.sizes.empty()) return invalid_argument("an element has ", *nbytes, " bytes");
  const int64_t row_nbytes = *nbytes / copy.sizes[0];
  const int64_t part = std::max<int64_t>(1, buffer_.nbytes() / row_nbytes);
  for (int64_t i = 0; i < copy.sizes[0]; i += part) {
    StridedCopy rows = copy;
    rows.sizes[0] = std::min(part, copy.sizes[0] - i);
    rows.src_offset += i * copy.src_strides[0];
    rows.dst_offset += i * copy.dst_strides[0];
    RETURN_IF_ERROR(copy_parts(simplified(rows), direction, src, dst));
  }
  return ok_status();
}

Status CudaTensors::copy_part(const StridedCopy& copy, PackDirection direction,
                              const std::byte* src, std::byte* dst) const {
  const bool packs = direction == PackDirection::kPack;
  const Dims packed = packed_strides(copy);
  StridedCopy on_gpu = copy;   // Between the tensor and the buffer,
  StridedCopy on_host = copy;  // and between the buffer and the memory of the host.
  (packs ? on_gpu.dst_strides : on_gpu.src_strides) = packed;
  (packs ? on_gpu.dst_offset : on_gpu.src_offset) = 0;
  (packs ? on_host.src_strides : on_host.dst_strides) = packed;
  (packs ? on_host.src_offset : on_host.dst_offset) = 0;

  const int64_t nbytes = checked_numel(copy.sizes).value_or(0) * copy.itemsize;
  const TensorCopy tensor = {packs ? const_cast<std::byte*>(src) : dst, on_gpu};
  ASSIGN_OR_RETURN(PackPlan made, plan_pack(direction, {&tensor, 1}, {.staging_nbytes = nbytes}));
  ASSIGN_OR_RETURN(const auto plan, device_->upload(std::move(made)));
  const MutableBytes buffer = slice(buffer_.bytes(), 0, nbytes);
  if (packs) {
    ASSIGN_OR_RETURN(const auto packed_there, device_->pack_to_host(*plan, buffer, after_));
    RETURN_IF_ERROR(packed_there->wait());
    return cpu_device().copy(on_host, buffer.data(), dst);
  }
  RETURN_IF_ERROR(cpu_device().copy(on_host, src, buffer.data()));
  ASSIGN_OR_RETURN(const auto unpacked, device_->unpack_from_host(*plan, buffer, after_));
  return unpacked->wait();
}

Result<uint32_t> CudaTensors::copy_and_checksum(Bytes src, MutableBytes dst, uint32_t crc) const {
  if (src.empty()) return crc;
  RETURN_IF_ERROR(copy({.sizes = {ssize(src)}, .src_strides = {1}, .dst_strides = {1}}, src.data(),
                       dst.data()));
  const CurrentDevice current(device_->ordinal());
  ASSIGN_OR_RETURN(const bool from_gpu, on_gpu(src.data()));
  return crc32(crc, from_gpu ? Bytes(dst) : src);
}

Result<std::unique_ptr<DeviceEvent>> CudaTensors::unpack(std::span<const TensorCopy> copies,
                                                         Bytes buffer) const {
  const PackOptions options = {.staging_nbytes = ssize(buffer),
                               .window_nbytes = device_->window_nbytes()};
  ASSIGN_OR_RETURN(PackPlan made, plan_pack(PackDirection::kUnpack, copies, options));
  const std::scoped_lock lock(mutex_);
  // The tables are freed in the order of the stream: the plan need not outlast the copies.
  ASSIGN_OR_RETURN(const auto plan, device_->upload(std::move(made)));
  const CurrentDevice current(device_->ordinal());
  ASSIGN_OR_RETURN(const bool there, on_gpu(buffer.data()));
  ASSIGN_OR_RETURN(auto started, there ? device_->unpack_on_device(*plan, buffer, after_)
                                       : device_->unpack_from_host(*plan, buffer, after_));
  return std::unique_ptr<DeviceEvent>(std::move(started));
}

Result<std::unique_ptr<DeviceEvent>> CudaTensors::pack(std::span<const TensorCopy> copies,
                                                       MutableBytes buffer) const {
  const std::scoped_lock lock(mutex_);
  auto started = start_pack(copies, buffer, PackOptions().direct_nbytes);
  if (started.ok()) return started;
  auto without_windows = start_pack(copies, buffer, 1);
  return without_windows.ok() ? std::move(without_windows) : std::move(started);
}

// Requires: `mutex_`.
Result<std::unique_ptr<DeviceEvent>> CudaTensors::start_pack(std::span<const TensorCopy> copies,
                                                             MutableBytes buffer,
                                                             int64_t direct_nbytes) const {
  const PackOptions options = {.staging_nbytes = ssize(buffer),
                               .window_nbytes = device_->window_nbytes(),
                               .direct_nbytes = direct_nbytes};
  ASSIGN_OR_RETURN(PackPlan made, plan_pack(PackDirection::kPack, copies, options));
  // Of the tables: as above.
  ASSIGN_OR_RETURN(const auto plan, device_->upload(std::move(made)));
  ASSIGN_OR_RETURN(auto started, device_->pack_to_host(*plan, buffer, after_));
  return std::unique_ptr<DeviceEvent>(std::move(started));
}

}  // namespace torch_ckpt

#endif  // TORCH_CKPT_HAVE_CUDA
