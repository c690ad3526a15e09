#include "engine/load/load_job.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <string_view>
#include <utility>

#include "bindings/devices.h"
#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"
#include "bindings/plan.h"
#include "engine/load/planned_reads.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// File, offset, length, FQN.
using PySlice = std::tuple<std::string, int64_t, int64_t, std::string>;

// Slice, offsets of the requested box in the stored tensor, destination.
using PyTensorRequest = std::tuple<PySlice, Dims, const TensorView*>;

StoredSlice to_slice(const PySlice& slice) {
  const auto& [file, offset, nbytes, name] = slice;
  return {file, offset, nbytes, name};
}

// By FQN: code of the dtype, sizes, block, whether it is transposed, scales, code of their dtype,
// codes of the dtypes that targets get.
using PyQuantized =
    std::map<std::string, std::tuple<int, Dims, Dims, bool, PySlice, int, std::vector<int>>>;

// A class of its own, since pybind11 converts maps.
struct PyQuantizedTensors {
  std::shared_ptr<const QuantizedTensors> tensors;
};

PyQuantizedTensors make_quantized(const PyQuantized& tensors) {
  const auto dtype_of = [](int code) {
    if (code < 0 || code >= kDTypeCount) throw py::value_error("there is no such dtype");
    return static_cast<DType>(code);
  };
  auto out = std::make_shared<QuantizedTensors>();
  for (const auto& [fqn, facts] : tensors) {
    const auto& [dtype, sizes, block, is_transposed, scales, scale_dtype, targets] = facts;
    if (targets.empty()) throw py::value_error("no dtype is given");
    QuantizedTensor& tensor = (*out)[fqn];
    tensor = {.dtype = dtype_of(dtype),
              .sizes = sizes,
              .block = block,
              .is_transposed = is_transposed,
              .scales = to_slice(scales),
              .scale_dtype = dtype_of(scale_dtype),
              .targets = {}};
    for (const int code : targets) tensor.targets.push_back(dtype_of(code));
  }
  return {std::move(out)};
}

UnlockedPtr<LoadJob> make_load_job(FileSystem& fs, const std::filesystem::path& directory,
                                   std::shared_ptr<StoredIndex> index, int64_t buffer_nbytes,
                                   int64_t block_nbytes, int threads, bool direct, bool verify,
                                   std::shared_ptr<Records> records,
                                   std::optional<ReachableFiles> reachable,
                                   const PyQuantizedTensors* quantized) {
  const LoadOptions options = {.buffer_nbytes = buffer_nbytes,
                               .block_nbytes = block_nbytes,
                               .threads = threads,
                               .caching = direct ? Caching::kDirect : Caching::kBuffered,
                               .verify = verify,
                               .records = std::move(records),
                               .reachable = std::move(reachable),
                               .quantized = quantized == nullptr ? nullptr : quantized->tensors};
  auto job = value_or_raise(without_gil(
      [&] { return LoadJob::make(fs, directory.string(), options, std::move(index)); }));
  return UnlockedPtr<LoadJob>(job.release());
}

// File -> offset, length and CRC-32 of each record.
using PyRecords = std::map<std::string, std::vector<std::tuple<int64_t, int64_t, uint32_t>>>;

std::shared_ptr<Records> make_records(bool full, const PyRecords& by_file) {
  std::map<std::string, std::vector<StoredRecord>> out;
  for (const auto& [file, records] : by_file) {
    for (const auto& [offset, nbytes, crc] : records) {
      out[file].push_back({{offset, offset + nbytes}, crc});
    }
  }
  return std::make_shared<Records>(full, std::move(out));
}

std::vector<StoredSlice> to_slices(const std::vector<PySlice>& slices) {
  std::vector<StoredSlice> out;
  out.reserve(slices.size());
  for (const PySlice& slice : slices) out.push_back(to_slice(slice));
  return out;
}

void check_slices(LoadJob& job, const std::vector<PySlice>& slices) {
  const std::vector<StoredSlice> stored = to_slices(slices);
  raise_if_error(without_gil([&] { return job.check(stored); }));
}

using OnTensor = std::function<void(int64_t request, LoadedBytes elements)>;

// Runs a job without the GIL. `on_tensor` receives the number and the elements of each request
// without memory. An exception of `on_tensor` ends the job and is rethrown.
LoadResult run(LoadJob& job, const std::vector<TensorRequest>& requests,
               const std::vector<StoredSlice>& slices, const OnTensor& on_tensor,
               ExchangeStream* exchange, bool slices_are_archives = false) {
  std::exception_ptr raised;
  HandOver hand_over;
  if (on_tensor) {
    hand_over = [&](int64_t request, LoadedBytes elements) {
      const py::gil_scoped_acquire locked;
      try {
        on_tensor(request, std::move(elements));
      } catch (const py::error_already_set&) {
        raised = std::current_exception();
        return cancelled("the callback for a loaded tensor failed");
      }
      return ok_status();
    };
  }
  Result<LoadResult> result = without_gil(
      [&] { return job.run(requests, slices, hand_over, exchange, slices_are_archives); });
  if (raised != nullptr) std::rethrow_exception(raised);
  return value_or_raise(std::move(result));
}

std::vector<TensorRequest> to_requests(const std::vector<PyTensorRequest>& tensors,
                                       Devices& devices) {
  std::vector<TensorRequest> requests;
  requests.reserve(tensors.size());
  for (const auto& [slice, offsets, destination] : tensors) {
    if (destination == nullptr || !destination->writable)
      throw py::value_error("the destination of a load is not writable");
    requests.push_back({to_slice(slice),
                        {offsets, destination->sizes},
                        devices.live(*destination, destination->name)});
  }
  return requests;
}

// Returns for each tensor whether it was loaded (torch must load the others), and the raw slices.
std::pair<std::vector<bool>, std::vector<LoadedBytes>> run_job(
    LoadJob& job, const std::vector<PyTensorRequest>& tensors, const std::vector<PySlice>& bytes,
    const std::optional<py::function>& on_tensor, ExchangeStream* exchange,
    bool slices_are_archives) {
  OnTensor on_request;
  if (on_tensor) {
    on_request = [&](int64_t request, LoadedBytes elements) {
      (*on_tensor)(request, std::move(elements));
    };
  }
  Devices devices;
  LoadResult result = run(job, to_requests(tensors, devices), to_slices(bytes), on_request,
                          exchange, slices_are_archives);
  std::vector<bool> loaded;
  loaded.reserve(result.outcomes.size());
  for (const Outcome outcome : result.outcomes) loaded.push_back(outcome == Outcome::kLoaded);
  return {std::move(loaded), std::move(result.bytes)};
}

// Returns the encoded byte ranges that the requests would read.
py::bytes wanted(LoadJob& job, const std::vector<TensorRequest>& requests,
                 const std::vector<StoredSlice>& slices = {}) {
  return to_bytes(value_or_raise(without_gil([&]() -> Result<std::vector<std::byte>> {
    ASSIGN_OR_RETURN(WantedBytes bytes, job.wanted(requests, slices));
    return bytes.encode();
  })));
}

// Returns for each tensor whether the engine reads it; torch must read the others.
std::vector<bool> readable(LoadJob& job, const std::vector<PyTensorRequest>& tensors) {
  Devices devices;
  const std::vector<TensorRequest> requests = to_requests(tensors, devices);
  const std::vector<Outcome> outcomes =
      value_or_raise(without_gil([&] { return job.outcomes(requests); }));
  std::vector<bool> out;
  for (const Outcome outcome : outcomes) out.push_back(outcome == Outcome::kLoaded);
  return out;
}

const PlannedRead& read_at(const PlannedReads& reads, int64_t number) {
  if (number < 0 || number >= reads.size()) throw py::index_error("there is no such read");
  return reads.at(number);
}

// Returns the number of an item among those of its FQN, which are consecutive.
int64_t number_within_fqn(const ItemTable& items, int64_t item) {
  const auto before = std::views::iota(int64_t{0}, item);
  const auto is_other = [&](int64_t other) { return items.entry(other) != items.entry(item); };
  const auto first = std::ranges::partition_point(before, is_other);
  return std::ranges::distance(first, before.end());
}

// Returns: FQN, whether the item is an object, offsets of the item and its number among those of
// the FQN, number of the stored box, its offsets; and for the common region its offsets in the
// item, its offsets in the stored box, and its sizes.
py::tuple describe_read(const PlannedReads& reads, int64_t number) {
  const PlannedRead& read = read_at(reads, number);
  const std::string_view fqn = reads.items().fqn(read.item);
  return py::make_tuple(py::str(fqn.data(), fqn.size()), read.is_object,
                        to_dims(reads.items().box(read.item).offsets),
                        number_within_fqn(reads.items(), read.item), read.box, read.box_offsets,
                        read.dest_offsets, read.storage_offsets, read.lengths);
}

// Reads into the tensors of `batch`, one per item of the table. For a tensor that needs a copy,
// calls `on_tensor` with the number of the read and the elements in the stored dtype. Returns the
// numbers of the reads that the caller must do by other means, in DCP's order.
std::vector<int64_t> run_reads(const PlannedReads& reads, LoadJob& job, const TensorBatch& batch,
                               const py::function& on_tensor, ExchangeStream* exchange) {
  Devices devices;
  auto [requests, numbers, unread] =
      value_or_raise(reads.requests(job, batch, [&](const TensorView& view, std::string_view name) {
        return devices.live(view, name);
      }));
  const std::vector<int64_t>& number_of = numbers;
  const auto on_request = [&](int64_t request, LoadedBytes elements) {
    on_tensor(number_of[static_cast<size_t>(request)], std::move(elements));
  };
  const LoadResult result = run(job, requests, {}, on_request, exchange);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (result.outcomes[i] != Outcome::kLoaded) unread.push_back(numbers[i]);
  }
  reads.sort(&unread);
  return unread;
}

}  // namespace

void bind_load_job(py::module_& module) {
  py::class_<LoadedBytes>(module, "LoadedBytes", py::buffer_protocol())
      .def_buffer([](LoadedBytes& bytes) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(bytes.data.get()), bytes.nbytes,
                               /*readonly=*/false);
      });
  py::class_<Records, std::shared_ptr<Records>>(module, "Records")
      .def(py::init(&make_records), py::arg("full"), py::arg("by_file"));
  py::class_<PyQuantizedTensors>(module, "QuantizedTensors")
      .def(py::init(&make_quantized), py::arg("tensors"));
  py::class_<LoadJob, UnlockedPtr<LoadJob>>(module, "LoadJob")
      .def(py::init(&make_load_job), py::arg("fs"), py::arg("directory"), py::arg("index"),
           py::arg("buffer_nbytes"), py::arg("block_nbytes"), py::arg("threads"), py::arg("direct"),
           py::arg("verify"), py::arg("records") = nullptr, py::arg("reachable") = py::none(),
           py::arg("quantized") = static_cast<PyQuantizedTensors*>(nullptr), py::keep_alive<1, 2>())
      .def("check", &check_slices, py::arg("slices"))
      .def("cancel", &LoadJob::cancel)
      .def_property_readonly("done_nbytes", &LoadJob::loaded_nbytes)
      .def_property_readonly("requests", &LoadJob::requests)
      .def_property_readonly("waited_s", &LoadJob::waited_s)
      .def(
          "wanted_bytes",
          [](LoadJob& job, const std::vector<PyTensorRequest>& tensors,
             const std::vector<PySlice>& slices) {
            Devices devices;
            return wanted(job, to_requests(tensors, devices), to_slices(slices));
          },
          py::arg("tensors"), py::arg("slices") = std::vector<PySlice>())
      .def("readable", &readable, py::arg("tensors"))
      .def("run", &run_job, py::arg("tensors"), py::arg("slices"),
           py::arg("on_tensor") = py::none(), py::arg("exchange") = nullptr,
           py::arg("slices_are_archives") = false);
  py::class_<PlannedReads>(module, "Reads")
      .def(py::init([](const std::shared_ptr<StoredIndex>& index,
                       const std::shared_ptr<PyItemTable>& items, bool partial) {
             return value_or_raise(
                 without_gil([&] { return PlannedReads::make(index, table_of(items), partial); }));
           }),
           py::arg("index"), py::arg("items"), py::arg("partial"))
      .def("__len__", &PlannedReads::size)
      .def_property_readonly("nbytes", &PlannedReads::nbytes)
      .def("describe", &describe_read, py::arg("number"))
      .def(
          "check",
          [](const PlannedReads& reads, LoadJob& job) {
            raise_if_error(without_gil([&] { return job.check(reads.slices()); }));
          },
          py::arg("job"))
      .def(
          "wanted_bytes",
          [](const PlannedReads& reads, LoadJob& job) { return wanted(job, reads.requests(job)); },
          py::arg("job"))
      .def("run", &run_reads, py::arg("job"), py::arg("batch"), py::arg("on_tensor"),
           py::arg("exchange") = nullptr);
}

}  // namespace torch_ckpt
