#include "engine/load_job.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/errors.h"
#include "bindings/jobs.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// File, offset, length, FQN.
using PySlice = std::tuple<std::string, int64_t, int64_t, std::string>;

// Slice, offsets of the wanted box in the stored tensor, destination.
using PyTensorRequest = std::tuple<PySlice, Dims, const TensorView*>;

StoredSlice to_slice(const PySlice& slice) {
  const auto& [file, offset, nbytes, name] = slice;
  return {file, offset, nbytes, name};
}

std::unique_ptr<LoadJob> make(FileSystem& fs, const std::string& directory,
                              std::shared_ptr<StoredIndex> index, int64_t buffer_nbytes,
                              int64_t block_nbytes, int threads, bool direct, bool verify,
                              bool slices_are_archives) {
  const LoadOptions options = {.buffer_nbytes = buffer_nbytes,
                               .block_nbytes = block_nbytes,
                               .threads = threads,
                               .caching = direct ? Caching::kDirect : Caching::kBuffered,
                               .verify = verify,
                               .slices_are_archives = slices_are_archives};
  return value_or_raise(
      without_gil([&] { return LoadJob::make(fs, directory, options, std::move(index)); }));
}

std::vector<StoredSlice> to_slices(const std::vector<PySlice>& slices) {
  std::vector<StoredSlice> out;
  out.reserve(slices.size());
  for (const PySlice& slice : slices) out.push_back(to_slice(slice));
  return out;
}

void check(const LoadJob& job, const std::vector<PySlice>& slices) {
  const std::vector<StoredSlice> stored = to_slices(slices);
  raise_if_error(without_gil([&] { return job.check(stored); }));
}

// For each tensor whether it was loaded (False leaves it to torch), and the raw slices.
std::pair<std::vector<bool>, std::vector<LoadedBytes>> run(
    LoadJob& job, const std::vector<PyTensorRequest>& tensors, const std::vector<PySlice>& bytes) {
  std::vector<TensorRequest> requests;
  requests.reserve(tensors.size());
  for (const auto& [slice, offsets, destination] : tensors) {
    if (destination == nullptr || !destination->writable)
      throw py::value_error("a destination is a view for reading");
    requests.push_back({to_slice(slice), {offsets, destination->sizes}, to_live(*destination)});
  }
  const std::vector<StoredSlice> slices = to_slices(bytes);
  LoadResult result = value_or_raise(without_gil([&] { return job.run(requests, slices); }));
  std::vector<bool> loaded;
  loaded.reserve(result.outcomes.size());
  for (const Outcome outcome : result.outcomes) loaded.push_back(outcome == Outcome::kLoaded);
  return {std::move(loaded), std::move(result.bytes)};
}

}  // namespace

void bind_load_job(py::module_& module) {
  py::class_<LoadedBytes>(module, "LoadedBytes", py::buffer_protocol())
      .def_buffer([](LoadedBytes& bytes) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(bytes.data.get()), bytes.nbytes,
                               /*readonly=*/true);
      });
  py::class_<LoadJob>(module, "LoadJob")
      .def(py::init(&make), py::arg("fs"), py::arg("directory"), py::arg("index"),
           py::arg("buffer_nbytes"), py::arg("block_nbytes"), py::arg("threads"), py::arg("direct"),
           py::arg("verify"), py::arg("slices_are_archives"), py::keep_alive<1, 2>())
      .def("check", &check, py::arg("slices"))
      .def("run", &run, py::arg("tensors"), py::arg("slices"));
}

}  // namespace torch_ckpt
