// Differences between two versions of weights, for publishing.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "codec/block.h"
#include "codec/zstd.h"
#include "engine/publish/difference.h"
#include "engine/publish/merge.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

using PyBox = std::pair<Dims, Dims>;  // Offsets, sizes.

// The memory of a buffer, as long as this object.
class BufferView {
 public:
  explicit BufferView(const py::buffer& buffer, bool writable = false)
      : info_(buffer.request(writable)) {
    int64_t stride = info_.itemsize;
    for (auto d = static_cast<size_t>(info_.ndim); d-- > 0;) {
      if (info_.shape[d] > 1 && info_.strides[d] != stride) {
        throw py::value_error("the buffer is not contiguous");
      }
      stride *= info_.shape[d];
    }
  }

  MutableBytes bytes() const {
    return {static_cast<std::byte*>(info_.ptr), static_cast<size_t>(info_.size * info_.itemsize)};
  }

 private:
  py::buffer_info info_;
};

std::span<uint64_t> digests_in(const BufferView& buffer) {
  const MutableBytes bytes = buffer.bytes();
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  if (address % alignof(uint64_t) != 0 || bytes.size() % sizeof(uint64_t) != 0) {
    throw py::value_error("the buffer does not have aligned digests of 8 bytes");
  }
  return {reinterpret_cast<uint64_t*>(bytes.data()), bytes.size() / sizeof(uint64_t)};
}

// Returns a view's tensor. Raises if it is not in host memory, or read-only and to be written.
LiveTensor in_host_memory(const TensorView& view, bool written) {
  if (view.gpu >= 0) throw py::value_error("the tensor is not in host memory");
  if (view.data == nullptr && checked_numel(view.sizes).value_or(0) > 0) {
    throw py::value_error("the tensor has no memory");
  }
  if (written && !view.writable) throw py::value_error("the tensor is read-only");
  return to_live(view);
}

py::bytes to_python(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::pair<py::bytes, py::bytes> encode(BoxDifference& difference, int threads) {
  const EncodedDifference encoded =
      value_or_raise(without_gil([&] { return difference.encode(threads); }));
  return {to_python(encoded.payload), to_python(encoded.table)};
}

BoxDifference take(const TensorView& snapshot, const TensorView& source, int64_t first_block,
                   int64_t end_block, const py::buffer& digests, int threads,
                   const std::shared_ptr<DifferenceMemory>& memory) {
  const BufferView buffer(digests, /*writable=*/true);
  const LiveTensor to = in_host_memory(snapshot, true);
  const LiveTensor from = in_host_memory(source, false);
  const std::span<uint64_t> values = digests_in(buffer);
  return value_or_raise(without_gil(
      [&] { return take_difference(to, from, first_block, end_block, values, threads, memory); }));
}

void take_all(const TensorView& snapshot, const TensorView& source, const py::buffer& digests,
              int threads) {
  const BufferView buffer(digests, /*writable=*/true);
  const LiveTensor to = in_host_memory(snapshot, true);
  const LiveTensor from = in_host_memory(source, false);
  const std::span<uint64_t> values = digests_in(buffer);
  raise_if_error(without_gil([&] { return take_snapshot(to, from, values, threads); }));
}

void merge(const std::optional<py::buffer>& mask, const TensorView* target, const PyBox& box,
           const PyBox& stored, int64_t itemsize, const py::buffer& table, int64_t first_block,
           const py::buffer& payload, int threads) {
  std::optional<BufferView> mask_buffer;
  if (mask) mask_buffer.emplace(*mask, /*writable=*/true);
  const BufferView table_buffer(table);
  const BufferView payload_buffer(payload);
  if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8 && itemsize != 16) {
    throw py::value_error("no element has " + std::to_string(itemsize) + " bytes");
  }
  for (const auto& [offsets, sizes] : {box, stored}) {
    if (offsets.size() != sizes.size() || !checked_numel(sizes)) {
      throw py::value_error("a box is invalid");
    }
  }
  std::optional<LiveTensor> live;
  if (target != nullptr) live = in_host_memory(*target, false);
  const StoredBlocks blocks = {.box = {stored.first, stored.second},
                               .itemsize = itemsize,
                               .first_block = first_block,
                               .table = table_buffer.bytes(),
                               .payload = payload_buffer.bytes()};
  raise_if_error(without_gil([&] {
    return merge_blocks(mask_buffer ? mask_buffer->bytes() : MutableBytes(),
                        live ? &*live : nullptr, {box.first, box.second}, blocks, threads);
  }));
}

void apply(const TensorView& target, const py::buffer& mask, int threads) {
  const BufferView buffer(mask);
  const LiveTensor live = in_host_memory(target, true);
  raise_if_error(without_gil([&] { return apply_mask(live, buffer.bytes(), threads); }));
}

// Returns the reason why this build cannot encode or merge differences, or None if it can.
py::object why_no_zstd() {
  const Status status = zstd_available();
  return status.ok() ? py::object(py::none()) : py::str(status.message());
}

}  // namespace

void bind_codec(py::module_& module) {
  module.attr("BLOCK_NBYTES") = kBlockNbytes;
  module.attr("BLOCK_ROW_NBYTES") = kBlockRowNbytes;
  module.def("why_no_zstd", &why_no_zstd);
  py::class_<DifferenceMemory, std::shared_ptr<DifferenceMemory>>(module, "DifferenceMemory")
      .def(py::init<>());
  py::class_<BoxDifference, UnlockedPtr<BoxDifference>>(module, "Difference")
      .def_property_readonly("nbytes", &BoxDifference::nbytes)
      .def("encode", &encode, py::arg("threads") = 1);
  module.def("take_difference", &take, py::arg("snapshot"), py::arg("source"),
             py::arg("first_block"), py::arg("end_block"), py::arg("digests"), py::arg("threads"),
             py::arg("memory").none(false));
  module.def("take_snapshot", &take_all, py::arg("snapshot"), py::arg("source"), py::arg("digests"),
             py::arg("threads"));
  module.def("merge_blocks", &merge, py::arg("mask"), py::arg("target").none(true), py::arg("box"),
             py::arg("stored"), py::arg("itemsize"), py::arg("table"), py::arg("first_block"),
             py::arg("payload"), py::arg("threads"));
  module.def("apply_mask", &apply, py::arg("target"), py::arg("mask"), py::arg("threads"));
}

}  // namespace torch_ckpt
