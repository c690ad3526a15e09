#include "engine/save/snapshot.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/devices.h"
#include "bindings/errors.h"
#include "bindings/jobs.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

std::shared_ptr<Snapshot> make_snapshot(int64_t nbytes, int threads) {
  return value_or_raise(without_gil([&] {
    HeapMemorySource heap;
    return Snapshot::make(heap, nbytes, threads);
  }));
}

// Pins the snapshot's memory for each GPU that has a tensor of the batch.
void pin_for(Snapshot& snapshot, const TensorBatch& batch, Devices& devices) {
  for (const TensorView& view : batch.views) {
    if (view.gpu < 0) continue;
    const Device& device = *devices.live(view, view.name).device;
    without_gil([&] { snapshot.pin_for(device); });
  }
}

// Copies the tensors at these positions of the batch to `offsets` in the snapshot. Raises for a
// tensor without memory.
void copy_into(Snapshot& snapshot, const TensorBatch& batch, const std::vector<int64_t>& positions,
               const std::vector<int64_t>& offsets, int threads, Devices& devices) {
  if (positions.size() != offsets.size()) {
    throw py::value_error("there are not as many offsets as tensors");
  }
  std::vector<PackedCopy> copies;
  copies.reserve(positions.size());
  for (size_t i = 0; i < positions.size(); ++i) {
    const TensorView& view = batch.views.at(static_cast<size_t>(positions[i]));
    if (view.data == nullptr && checked_numel(view.sizes).value_or(0) > 0) {
      throw py::value_error("a tensor without memory cannot be copied");
    }
    copies.push_back({devices.live(view, view.name), offsets[i]});
  }
  raise_if_error(without_gil([&] { return snapshot.copy(copies, threads); }));
}

}  // namespace

void bind_snapshot(py::module_& module) {
  py::class_<Devices>(module, "Devices").def(py::init<>());
  py::class_<Snapshot, std::shared_ptr<Snapshot>>(module, "Snapshot", py::buffer_protocol())
      .def(py::init(&make_snapshot), py::arg("nbytes"), py::arg("threads"))
      .def_property_readonly("nbytes",
                             [](const Snapshot& snapshot) { return ssize(snapshot.bytes()); })
      .def("pin_for", &pin_for, py::arg("batch"), py::arg("devices"))
      .def("copy", &copy_into, py::arg("batch"), py::arg("positions"), py::arg("offsets"),
           py::arg("threads"), py::arg("devices"))
      .def_buffer([](const Snapshot& snapshot) {
        const MutableBytes bytes = snapshot.bytes();
        return py::buffer_info(reinterpret_cast<uint8_t*>(bytes.data()), ssize(bytes));
      });
  module.def("place_in_snapshot", &place_in_snapshot, py::arg("end"), py::arg("nbytes"));
}

}  // namespace torch_ckpt
