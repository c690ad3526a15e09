#include "engine/unpacking.h"

#include <algorithm>
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

// Packs the source in row-major order first, because device plans reject elements that share bytes.
Status unpack_row_major(const Device& device, std::byte* tensor, StridedCopy copy,
                        const std::byte* from) {
  const int64_t nbytes = checked_numel(copy.sizes).value_or(0) * copy.itemsize;
  ASSIGN_OR_RETURN(const Memory memory, device.buffers().allocate(nbytes));
  StridedCopy to_row = copy;
  to_row.dst_offset = 0;
  to_row.dst_strides = contiguous_strides(copy.sizes);
  for (int64_t& stride : to_row.dst_strides) stride *= copy.itemsize;
  copy_on_cpu(to_row, from, memory.bytes().data());
  copy.src_offset = 0;
  copy.src_strides = to_row.dst_strides;
  const TensorCopy one = {tensor, std::move(copy)};
  ASSIGN_OR_RETURN(const auto event, device.unpack({&one, 1}, slice(memory.bytes(), 0, nbytes)));
  return event == nullptr ? ok_status() : event->wait();
}

}  // namespace

Unpacking& Unpacking::operator=(Unpacking&& other) noexcept {
  std::swap(buffer_, other.buffer_);
  std::swap(by_device_, other.by_device_);
  return *this;
}

Unpacking::~Unpacking() {
  for (const auto& [device, pending] : by_device_) {
    if (pending.event != nullptr) (void)pending.event->wait();
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
    const Status status = unpack_row_major(device, tensor, copy, from);
    return status.ok() ? status : with_names({&name}, status);
  }
  pending.copies.push_back({tensor, copy});
  pending.copies.back().copy.src_offset += from - buffer_.data();
  return ok_status();
}

Status Unpacking::start() {
  for (auto& [device, pending] : by_device_) {
    if (pending.copies.empty()) continue;
    auto begun = device->unpack(pending.copies, buffer_);
    if (!begun.ok()) return with_names(pending.names, begun.status());
    pending.event = std::move(*begun);
    pending.copies = {};
  }
  return ok_status();
}

Result<bool> Unpacking::done() {
  for (auto& [device, pending] : by_device_) {
    if (pending.event == nullptr) continue;
    const Result<bool> is_done = pending.event->done();
    if (!is_done.ok()) return with_names(pending.names, is_done.status());
    if (!*is_done) return false;
  }
  return true;
}

Status Unpacking::wait() {
  Status first;
  for (auto& [device, pending] : by_device_) {
    if (pending.event == nullptr) continue;
    const Status status = pending.event->wait();
    pending.event.reset();
    if (first.ok() && !status.ok()) first = with_names(pending.names, status);
  }
  return first;
}

}  // namespace torch_ckpt
