#include "engine/save/save_job.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <filesystem>

#include "base/memory.h"
#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

using PyExtent = std::pair<int64_t, int64_t>;  // Offset and length of a slice.

std::vector<PyExtent> layout_extents(const Layout& layout) {
  std::vector<PyExtent> out;
  out.reserve(layout.slices.size());
  for (const Slice& slice : layout.slices) out.emplace_back(slice.offset, slice.total_nbytes());
  return out;
}

std::unique_ptr<BufferPool> make_pool(int64_t nbytes, int64_t block_nbytes) {
  HeapMemorySource heap;
  return value_or_raise(BufferPool::make(heap, nbytes, block_nbytes));
}

// py::keep_alive (below) extends the lifetime of `fs` and `pool` to that of the job.
UnlockedPtr<SaveJob> start_save(FileSystem& fs, const std::filesystem::path& path,
                                const Layout& layout, BufferPool& pool, bool direct, bool sync,
                                int niceness) {
  const SaveOptions options = save_options(direct, sync, niceness);
  auto job = value_or_raise(
      without_gil([&] { return SaveJob::start(fs, path.string(), layout, pool, options); }));
  return UnlockedPtr<SaveJob>(job.release());
}

PyExtent append(SaveJob& job, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  const Bytes bytes(static_cast<const std::byte*>(info.ptr),
                    static_cast<size_t>(info.size * info.itemsize));
  const Slice appended = value_or_raise(without_gil([&] { return job.append(bytes); }));
  return {appended.offset, appended.total_nbytes()};
}

}  // namespace

PyIoMode to_python(const IoMode& mode) {
  std::vector<std::string> reasons;
  for (const std::string& reason : {mode.queue.reason, mode.reason}) {
    if (!reason.empty()) reasons.push_back(reason);
  }
  return {mode.queue.name, mode.direct, mode.queue.registered, reasons};
}

void bind_save_job(py::module_& module) {
  py::class_<Layout>(module, "Layout").def_property_readonly("extents", &layout_extents);
  py::class_<BufferPool>(module, "BufferPool")
      .def(py::init(&make_pool), py::arg("nbytes"), py::arg("block_nbytes"))
      .def_property_readonly("nbytes", [](const BufferPool& pool) { return ssize(pool.arena()); });
  py::class_<FileJob, UnlockedPtr<FileJob>>(module, "FileJob")
      .def("finish",
           [](FileJob& job) { raise_if_error(without_gil([&] { return job.finish(); })); })
      .def("abort", [](FileJob& job) { without_gil([&] { job.abort(); }); })
      .def("cancel", &FileJob::cancel)
      .def_property_readonly("done_nbytes",
                             [](const FileJob& job) { return job.counts().done_nbytes(); })
      .def_property_readonly("requests", [](const FileJob& job) { return job.counts().requests(); })
      .def_property_readonly("waited_s", [](const FileJob& job) { return job.counts().waited_s(); })
      .def_property_readonly("mode", [](const FileJob& job) { return to_python(job.mode()); });
  py::class_<SaveJob, FileJob, UnlockedPtr<SaveJob>>(module, "SaveJob")
      .def(py::init(&start_save), py::arg("fs"), py::arg("path"), py::arg("layout"),
           py::arg("pool"), py::arg("direct"), py::arg("sync"), py::arg("niceness") = 0,
           py::keep_alive<1, 2>(), py::keep_alive<1, 5>())
      .def("append", &append, py::arg("data"))
      .def_property_readonly("sums", [](const SaveJob& job) {
        return py::make_tuple(job.sums().file_nbytes, to_bytes(job.sums()));
      });
}

}  // namespace torch_ckpt
