// The extension module torch_ckpt._native: what Python may ask of the engine. Private to the
// package, which wraps it in torch's own terms; _native.pyi states the types.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/dtype.h"
#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/metadata_unpickler.h"
#include "bindings/tensor_view.h"
#include "engine/commit.h"
#include "io/posix_file_system.h"

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

void commit(const std::string& directory, const std::string& name, const py::bytes& metadata,
            const std::string& save_id, bool sync) {
  const auto text = static_cast<std::string_view>(metadata);
  raise_if_error(without_gil([&] {
    return commit_metadata(local_file_system(), directory, name, as_bytes(text), save_id, sync);
  }));
}

void create_directories(const std::string& path) {
  raise_if_error(without_gil([&] { return local_file_system().create_directories(path); }));
}

void sync_directory(const std::string& path) {
  raise_if_error(without_gil([&] { return local_file_system().sync_directory(path); }));
}

py::bytes read_whole_file(const std::string& path) {
  const std::vector<std::byte> bytes =
      value_or_raise(without_gil([&] { return read_file(local_file_system(), path); }));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

py::object unpickle(const py::bytes& pickle, const py::dict& vocabulary) {
  Status status;
  PyObject* value =
      unpickle_metadata(as_bytes(static_cast<std::string_view>(pickle)), vocabulary.ptr(), &status);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  raise_if_error(status);
  return py::reinterpret_steal<py::object>(value);
}

}  // namespace

FileSystem& local_file_system() {
  static PosixFileSystem file_system;
  return file_system;
}

}  // namespace torch_ckpt

PYBIND11_MODULE(_native, module) {
  using namespace torch_ckpt;
  module.doc() = "The native engine of torch_ckpt.";
  py::enum_<TensorKind>(module, "TensorKind")
      .value("PLAIN", TensorKind::kPlain)
      .value("NEEDS_COPY", TensorKind::kNeedsCopy)
      .value("TORCHS_OWN", TensorKind::kTorchsOwn);
  module.attr("DTYPE_NAMES") = dtype_names();
  module.def("tensor_kind", &tensor_kind, py::arg("tensor"));
  module.def("is_loadable", &is_loadable, py::arg("tensor"));
  module.def(
      "extent",
      [](py::handle tensor) {
        const TensorExtent extent = tensor_extent(tensor);
        return py::make_tuple(extent.storage, extent.begin, extent.end);
      },
      py::arg("tensor"));
  module.def("has_own_storage", &has_own_storage, py::arg("tensor"));
  module.def("commit_metadata", &commit, py::arg("directory"), py::arg("name"), py::arg("metadata"),
             py::arg("save_id"), py::arg("sync"));
  module.def("create_directories", &create_directories, py::arg("path"));
  module.def("sync_directory", &sync_directory, py::arg("path"));
  module.def("read_file", &read_whole_file, py::arg("path"));
  module.def("unpickle_metadata", &unpickle, py::arg("pickle"), py::arg("vocabulary"));
  bind_save_job(module);
  bind_load_job(module);
}
