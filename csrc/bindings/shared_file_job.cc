#include "engine/save/shared_file_job.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <filesystem>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// py::keep_alive (below) extends the lifetime of `fs` and `pool` to that of the job.
UnlockedPtr<SharedFileJob> start_shared_file(FileSystem& fs, const std::filesystem::path& path,
                                             int64_t file_nbytes, BufferPool& pool, bool direct,
                                             bool sync, int niceness) {
  const SaveOptions options = save_options(direct, sync, niceness);
  auto job = value_or_raise(without_gil(
      [&] { return SharedFileJob::start(fs, path.string(), file_nbytes, pool, options); }));
  return UnlockedPtr<SharedFileJob>(job.release());
}

void write_items(SharedFileJob& job,
                 const std::vector<std::tuple<const TensorView*, int64_t, Dims, Dims>>& items) {
  for (const auto& item : items) {
    if (std::get<0>(item) == nullptr) throw py::value_error("there is no tensor to write");
  }
  raise_if_error(nicely_without_gil(job.niceness(), [&] {
    Status status;
    for (size_t i = 0; i < items.size() && status.ok(); ++i) {
      const auto& [tensor, offset, sizes, box_offsets] = items[i];
      status = job.write({offset, sizes, box_offsets}, to_live(*tensor));
    }
    return status;
  }));
}

void put(SharedFileJob& job, int64_t offset, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  const Bytes bytes(static_cast<const std::byte*>(info.ptr),
                    static_cast<size_t>(info.size * info.itemsize));
  raise_if_error(without_gil([&] { return job.put(offset, bytes); }));
}

}  // namespace

void bind_shared_file_job(py::module_& module) {
  py::class_<SharedFileJob, FileJob, UnlockedPtr<SharedFileJob>>(module, "SharedFileJob")
      .def(py::init(&start_shared_file), py::arg("fs"), py::arg("path"), py::arg("file_nbytes"),
           py::arg("pool"), py::arg("direct"), py::arg("sync"), py::arg("niceness") = 0,
           py::keep_alive<1, 2>(), py::keep_alive<1, 5>())
      .def("write", &write_items, py::arg("items"))
      .def("put", &put, py::arg("offset"), py::arg("data"));
}

}  // namespace torch_ckpt
