#include "engine/save/snapshot.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/devices.h"
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

void fill(Snapshot& snapshot, const TensorBatch& batch, const std::vector<int64_t>& positions,
          const std::vector<int64_t>& offsets, int threads, Devices& devices) {
  const std::vector<PackedCopy> copies = to_copies(batch, positions, offsets, devices);
  raise_if_error(without_gil([&] { return snapshot.fill(copies, threads); }));
}

}  // namespace

void bind_snapshot(py::module_& module) {
  py::class_<Devices>(module, "Devices").def(py::init<>());
  py::class_<Snapshot>(module, "Snapshot", py::buffer_protocol())
      .def(py::init(&make), py::arg("nbytes"), py::arg("threads"))
      .def_property_readonly("nbytes",
                             [](const Snapshot& snapshot) { return ssize(snapshot.memory()); })
      .def("pin_for", &pin_for<Snapshot>, py::arg("batch"), py::arg("devices"))
      .def("fill", &fill, py::arg("batch"), py::arg("positions"), py::arg("offsets"),
           py::arg("threads"), py::arg("devices"))
      .def_buffer([](const Snapshot& snapshot) {
        const MutableBytes memory = snapshot.memory();
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()), ssize(memory));
      });
}

}  // namespace torch_ckpt
