#include "engine/copy_job.h"

#include <pybind11/pybind11.h>

#include <filesystem>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

void copy_one(CopyJob& job, int64_t file, FileSystem& from, const std::filesystem::path& source,
              FileSystem& to, const std::filesystem::path& target, int niceness) {
  raise_if_error(nicely_without_gil(
      niceness, [&] { return job.copy(file, from, source.string(), to, target.string()); }));
}

}  // namespace

void bind_copy_job(py::module_& module) {
  py::class_<CopyJob, UnlockedPtr<CopyJob>>(module, "CopyJob")
      .def(py::init([](std::shared_ptr<StoredIndex> index, int64_t nbytes_per_s) {
             return UnlockedPtr<CopyJob>(new CopyJob(std::move(index), nbytes_per_s));
           }),
           py::arg("index"), py::arg("nbytes_per_s"))
      .def("copy", &copy_one, py::arg("file"), py::arg("from_file_system"), py::arg("source"),
           py::arg("to_file_system"), py::arg("target"), py::arg("niceness"))
      .def("cancel", &CopyJob::cancel)
      .def_property_readonly("copied_nbytes", &CopyJob::copied_nbytes);
}

}  // namespace torch_ckpt
