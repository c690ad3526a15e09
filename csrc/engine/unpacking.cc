#include "engine/unpacking.h"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <numeric>
#include <utility>

namespace torch_ckpt {
namespace {

// Whether source elements share bytes, as in a saved expanded tensor.
bool source_overlaps_itself(const StridedCopy& copy) {
  std::vector<size_t> dims(copy.sizes.size());
  std::iota(dims.begin(), dims.end(), size_t{0});
  std::ranges::sort(dims, {}, [&](size_t d) { return copy.src_strides[d]; });
  int64_t extent = copy.itemsize;
  for (const size_t d : dims) {
    if (copy.sizes[d] == 1) continue;
    if (copy.src_strides[d] < extent) return true;
    extent += (copy.sizes[d] - 1) * copy.src_strides[d];
  }
  return false;
}

using Names = std::vector<const std::string*>;

// Formats the error as "cannot load 'a', 'b': why".
Status with_names(const Names& names, const Status& error) {
  constexpr size_t kMostNames = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMostNames); ++i) {
    text += str_cat(i == 0 ? "'" : ", '", *names[i], "'");
  }
  if (names.size() > kMostNames) text += str_cat(" and ", names.size() - kMostNames, " more");
  return Status(error.code(), str_cat("cannot load ", text, ": ", error.message()),
                error.error_number());
}

// Copies elements to a device's tensor from a buffer, which `fill` writes in row-major order first.
Status unpack_row_major(const Device& device, std::byte* tensor, StridedCopy copy,
                        const std::function<void(std::byte* buffer)>& fill) {
  const int64_t nbytes = checked_numel(copy.sizes).value_or(0) * copy.itemsize;
  ASSIGN_OR_RETURN(const Memory memory, device.buffers().allocate(nbytes));
  fill(memory.bytes().data());
  copy.src_offset = 0;
  copy.src_strides = contiguous_strides(copy.sizes);
  for (int64_t& stride : copy.src_strides) stride *= copy.itemsize;
  const TensorCopy one = {tensor, std::move(copy)};
  ASSIGN_OR_RETURN(const auto event, device.unpack({&one, 1}, slice(memory.bytes(), 0, nbytes)));
  return event == nullptr ? ok_status() : event->wait();
}

// Packs the source first, because device plans reject elements that share bytes.
Status unpack_overlapping(const Device& device, std::byte* tensor, const StridedCopy& copy,
                          const std::byte* from) {
  return unpack_row_major(device, tensor, copy, [&](std::byte* buffer) {
    StridedCopy to_row = copy;
    to_row.dst_offset = 0;
    to_row.dst_strides = contiguous_strides(copy.sizes);
    for (int64_t& stride : to_row.dst_strides) stride *= copy.itemsize;
    copy_on_cpu(to_row, from, buffer);
  });
}

}  // namespace

Unpacking& Unpacking::operator=(Unpacking&& other) noexcept {
  std::swap(buffer_, other.buffer_);
  std::swap(by_device_, other.by_device_);
  return *this;
}

Unpacking::~Unpacking() {
  for (const auto& [device, pending] : by_device_) {
    for (const auto& event : pending.events) (void)event->wait();
  }
}

Status Unpacking::add(const Device& device, const std::string& name, std::byte* tensor,
                      const StridedCopy& copy, const std::byte* from) {
  if (device.is_host()) {
    copy_on_cpu(copy, from, tensor);
    return ok_status();
  }
  if (checked_numel(copy.sizes).value_or(0) == 0) return ok_status();
  DeviceCopies& pending = by_device_[&device];
  if (pending.names.empty() || *pending.names.back() != name) pending.names.push_back(&name);
  if (source_overlaps_itself(copy)) {
    const Status status = unpack_overlapping(device, tensor, copy, from);
    return status.ok() ? status : with_names({&name}, status);
  }
  pending.copies.push_back({tensor, copy});
  pending.copies.back().copy.src_offset += from - buffer_.data();
  return ok_status();
}

Status Unpacking::add_dequantized(const Device& device, const std::string& name, std::byte* tensor,
                                  const Dims& strides, const Dequantization& dequantization,
                                  const Box& piece, const std::byte* from) {
  if (device.is_host()) {
    dequantization.run(piece, from, strides, tensor);
    return ok_status();
  }
  if (auto made = dequantization.for_device(piece, from, strides, tensor)) {
    auto begun = device.multiply(made->table, made->codes, made->values, made->scales);
    if (begun.ok()) {
      DeviceCopies& pending = by_device_[&device];
      if (pending.names.empty() || *pending.names.back() != name) pending.names.push_back(&name);
      if (*begun != nullptr) pending.events.push_back(std::move(*begun));
      return ok_status();
    }
    const Status& status = begun.status();
    // A table needs memory of the device, and a copy of products may need none.
    if (status.code() != StatusCode::kUnsupported && status.error_number() != ENOMEM) {
      return with_names({&name}, status);
    }
  }
  const Status status =
      unpack_row_major(device, tensor, dequantization.copy_of(piece, strides),
                       [&](std::byte* to) { dequantization.run_row_major(piece, from, to); });
  return status.ok() ? status : with_names({&name}, status);
}

Status Unpacking::start() {
  for (auto& [device, pending] : by_device_) {
    if (pending.copies.empty()) continue;
    auto begun = device->unpack(pending.copies, buffer_);
    if (!begun.ok()) return with_names(pending.names, begun.status());
    if (*begun != nullptr) pending.events.push_back(std::move(*begun));
    pending.copies = {};
  }
  return ok_status();
}

Result<bool> Unpacking::done() {
  for (auto& [device, pending] : by_device_) {
    for (const auto& event : pending.events) {
      const Result<bool> is_done = event->done();
      if (!is_done.ok()) return with_names(pending.names, is_done.status());
      if (!*is_done) return false;
    }
  }
  return true;
}

Status Unpacking::wait() {
  Status first;
  for (auto& [device, pending] : by_device_) {
    for (const auto& event : std::exchange(pending.events, {})) {
      const Status status = event->wait();
      if (first.ok() && !status.ok()) first = with_names(pending.names, status);
    }
  }
  return first;
}

}  // namespace torch_ckpt
