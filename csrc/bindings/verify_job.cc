#include "engine/load/verify_job.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <filesystem>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

UnlockedPtr<VerifyJob> make_verify_job(FileSystem& fs, const std::filesystem::path& directory,
                                       std::shared_ptr<StoredIndex> index, int64_t buffer_nbytes,
                                       int64_t block_nbytes, int threads, bool direct) {
  const LoadOptions options = {.buffer_nbytes = buffer_nbytes,
                               .block_nbytes = block_nbytes,
                               .threads = threads,
                               .caching = direct ? Caching::kDirect : Caching::kBuffered};
  auto job = value_or_raise(VerifyJob::make(fs, directory.string(), std::move(index), options));
  return UnlockedPtr<VerifyJob>(job.release());
}

std::vector<std::pair<int64_t, int64_t>> check_file(VerifyJob& job, int64_t file, int64_t begin,
                                                    int64_t end) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const ByteRange& range :
       value_or_raise(without_gil([&] { return job.check(file, begin, end); }))) {
    out.emplace_back(range.begin, range.end);
  }
  return out;
}

}  // namespace

void bind_verify_job(py::module_& module) {
  py::class_<VerifyJob, UnlockedPtr<VerifyJob>>(module, "VerifyJob")
      .def(py::init(&make_verify_job), py::arg("fs"), py::arg("directory"), py::arg("index"),
           py::arg("buffer_nbytes"), py::arg("block_nbytes"), py::arg("threads"), py::arg("direct"),
           py::keep_alive<1, 2>())
      .def("check", &check_file, py::arg("file"), py::arg("begin"), py::arg("end"))
      .def(
          "check_digests",
          [](VerifyJob& job, int64_t entry) {
            return value_or_raise(without_gil([&] { return job.check_digests(entry); }));
          },
          py::arg("entry"));
}

}  // namespace torch_ckpt
