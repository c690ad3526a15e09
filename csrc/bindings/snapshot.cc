#include "engine/snapshot.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/errors.h"
#include "bindings/jobs.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

std::unique_ptr<Snapshot> make(int64_t nbytes, int threads) {
  return value_or_raise(without_gil([&] {
    HeapMemorySource heap;
    return Snapshot::make(heap, nbytes, threads);
  }));
}

void fill(const Snapshot& snapshot,
          const std::vector<std::pair<const TensorView*, int64_t>>& tensors, int threads) {
  std::vector<PackedCopy> copies;
  for (const auto& [tensor, offset] : tensors) {
    if (tensor == nullptr) throw py::value_error("there is no tensor to copy");
    copies.push_back({to_live(*tensor), offset});
  }
  raise_if_error(without_gil([&] { return snapshot.fill(copies, threads); }));
}

}  // namespace

void bind_snapshot(py::module_& module) {
  py::class_<Snapshot>(module, "Snapshot", py::buffer_protocol())
      .def(py::init(&make), py::arg("nbytes"), py::arg("threads"))
      .def_property_readonly("nbytes",
                             [](const Snapshot& snapshot) { return ssize(snapshot.memory()); })
      .def("fill", &fill, py::arg("tensors"), py::arg("threads"))
      .def_buffer([](const Snapshot& snapshot) {
        const MutableBytes memory = snapshot.memory();
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()), ssize(memory));
      });
}

}  // namespace torch_ckpt
