// The extension module torch_ckpt._core._native: the Python interface of the engine. Private to the
// package; _native.pyi states the types.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/metadata_unpickler.h"
#include "bindings/plan.h"
#include "device/cuda_device.h"
#include "format/pickle_globals.h"
#include "format/zip_directory.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kDTypeCount; ++i) {
    names.emplace_back(dtype_info(static_cast<DType>(i)).name);
  }
  return names;
}

std::vector<int64_t> dtype_itemsizes() {
  std::vector<int64_t> sizes;
  for (int i = 0; i < kDTypeCount; ++i) sizes.push_back(itemsize(static_cast<DType>(i)));
  return sizes;
}

// Returns the view of a tensor that has no memory until it is loaded. `dtype` is a position in
// DTYPE_NAMES.
TensorView without_memory(int dtype, const Dims& sizes) {
  if (dtype < 0 || dtype >= kDTypeCount) throw py::value_error("there is no such dtype");
  if (!checked_numel(sizes)) throw py::value_error("the sizes are negative or too large");
  TensorView view;
  view.dtype = static_cast<DType>(dtype);
  view.sizes = sizes;
  view.strides = contiguous_strides(sizes);
  for (int64_t& stride : view.strides) stride *= itemsize(view.dtype);
  view.writable = true;
  return view;
}

// Returns the reason why this process cannot use a GPU, or None if it can.
py::object why_no_cuda() {
  const Status status = cuda_available();
  return status.ok() ? py::object(py::none()) : py::str(status.message());
}

py::object unpickle(const py::bytes& pickle, const py::dict& vocabulary) {
  Status status;
  PyObject* value =
      unpickle_metadata(as_bytes(static_cast<std::string_view>(pickle)), vocabulary.ptr(), &status);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  raise_if_error(status);
  return py::reinterpret_steal<py::object>(value);
}

Bytes contiguous_bytes(const py::buffer_info& info) {
  if (info.ndim != 1 || info.strides[0] != info.itemsize) throw py::value_error("not contiguous");
  return bytes_of(info);
}

// Returns the offset of the directory of an archive of `nbytes` bytes, of which `tail` is the end.
// If `tail` includes the directory, checks that torch can read the records without expanding them.
int64_t check_archive(const py::buffer& tail, int64_t nbytes) {
  const py::buffer_info info = tail.request();
  const Bytes bytes = contiguous_bytes(info);
  if (ssize(bytes) > nbytes) throw py::value_error("the tail is longer than the archive");
  const int64_t offset = value_or_raise(zip_directory_offset(bytes, nbytes));
  if (offset >= nbytes - ssize(bytes)) value_or_raise(read_zip_directory(bytes, nbytes));
  return offset;
}

// Returns the module and name of each global. The buffer begins with a pickle.
std::vector<std::pair<py::str, py::str>> globals_of(const py::buffer& pickle) {
  const py::buffer_info info = pickle.request();
  const Bytes bytes = contiguous_bytes(info);
  std::vector<std::pair<py::str, py::str>> globals;
  for (const auto& [module, name] : value_or_raise(pickle_globals(bytes))) {
    globals.emplace_back(to_text(std::string(module)), to_text(std::string(name)));
  }
  return globals;
}

}  // namespace
}  // namespace torch_ckpt

PYBIND11_MODULE(_native, module) {
  using namespace torch_ckpt;
  module.doc() = "The native engine of torch_ckpt. Does not need torch.";
  module.attr("DTYPE_NAMES") = dtype_names();
  module.attr("DTYPE_ITEMSIZES") = dtype_itemsizes();  // Bytes per element, in the same order.
  module.def("unpickle_metadata", &unpickle, py::arg("pickle"), py::arg("vocabulary"));
  module.def("why_no_cuda", &why_no_cuda);
  module.def("pickle_globals", &globals_of, py::arg("pickle"));
  module.def("check_archive", &check_archive, py::arg("tail"), py::arg("nbytes"));
  py::class_<TensorView>(module, "TensorView")
      .def_static("without_memory", &without_memory, py::arg("dtype"), py::arg("sizes"));
  bind_codec(module);
  bind_copy_job(module);
  bind_exchange(module);
  bind_file_system(module);
  bind_index(module);
  bind_object_store(module);
  bind_save_job(module);
  bind_snapshot(module);
  bind_load_job(module);
  bind_shared_file_job(module);
  bind_plan(module);
  bind_slot(module);
  bind_verify_job(module);
  bind_work(module);
}
