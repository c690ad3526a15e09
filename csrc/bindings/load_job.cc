#include "engine/load_job.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "bindings/devices.h"
#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/plan.h"
#include "engine/read_plan.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// File, offset, length, FQN.
using PySlice = std::tuple<std::string, int64_t, int64_t, std::string>;

// Slice, offsets of the wanted box in the stored tensor, destination.
using PyTensorRequest = std::tuple<PySlice, Dims, const TensorView*>;

// What GPUs' tensors are loaded by; `exchange` may have one already, in whose memory its pieces
// are.
const CudaTensors* holder_of(const ExchangeStream* exchange) {
  return dynamic_cast<const CudaTensors*>(exchange == nullptr ? nullptr : exchange->holder());
}

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

using OnTensor = std::function<void(int64_t request, LoadedBytes elements)>;

// Runs a job without the GIL. `on_tensor` takes the number of a request that came without memory,
// and its elements; what it raises ends the job, and is raised.
LoadResult run(LoadJob& job, const std::vector<TensorRequest>& requests,
               const std::vector<StoredSlice>& slices, const OnTensor& on_tensor,
               ExchangeStream* exchange) {
  std::exception_ptr raised;
  HandOver hand_over;
  if (on_tensor) {
    hand_over = [&](int64_t request, LoadedBytes elements) {
      const py::gil_scoped_acquire locked;
      try {
        on_tensor(request, std::move(elements));
      } catch (const py::error_already_set&) {
        raised = std::current_exception();
        return cancelled("a tensor could not be taken");
      }
      return ok_status();
    };
  }
  Result<LoadResult> result =
      without_gil([&] { return job.run(requests, slices, hand_over, exchange); });
  if (raised != nullptr) std::rethrow_exception(raised);
  return value_or_raise(std::move(result));
}

std::vector<TensorRequest> to_requests(const std::vector<PyTensorRequest>& tensors,
                                       Devices& devices) {
  std::vector<TensorRequest> requests;
  requests.reserve(tensors.size());
  for (const auto& [slice, offsets, destination] : tensors) {
    if (destination == nullptr || !destination->writable)
      throw py::value_error("a destination is a view for reading");
    requests.push_back({to_slice(slice),
                        {offsets, destination->sizes},
                        devices.live(*destination, destination->name)});
  }
  return requests;
}

// For each tensor whether it was loaded (False leaves it to torch), and the raw slices.
std::pair<std::vector<bool>, std::vector<LoadedBytes>> run_job(
    LoadJob& job, const std::vector<PyTensorRequest>& tensors, const std::vector<PySlice>& bytes,
    const std::optional<py::function>& on_tensor, ExchangeStream* exchange) {
  OnTensor on_request;
  if (on_tensor) {
    on_request = [&](int64_t request, LoadedBytes elements) {
      (*on_tensor)(request, std::move(elements));
    };
  }
  Devices devices(holder_of(exchange));
  LoadResult result =
      run(job, to_requests(tensors, devices), to_slices(bytes), on_request, exchange);
  std::vector<bool> loaded;
  loaded.reserve(result.outcomes.size());
  for (const Outcome outcome : result.outcomes) loaded.push_back(outcome == Outcome::kLoaded);
  return {std::move(loaded), std::move(result.bytes)};
}

// What the requests would read, encoded.
py::bytes wanted(LoadJob& job, const std::vector<TensorRequest>& requests) {
  return to_bytes(value_or_raise(without_gil([&]() -> Result<std::vector<std::byte>> {
    ASSIGN_OR_RETURN(WantedBytes bytes, job.wanted(requests));
    return bytes.encode();
  })));
}

StoredSlice to_slice(const ReadPlan& plan, const PlannedRead& read, const ItemTable& items) {
  return {plan.file(read.place.file), read.place.offset, read.place.nbytes,
          std::string(items.fqn(read.item))};
}

// What FastLoadPlanner has planned: a plan of reads, and the table of what they go to.
class Reads {
 public:
  Reads(std::shared_ptr<StoredIndex> index, std::shared_ptr<HeldTable> items, bool partial)
      : index_(std::move(index)), held_(std::move(items)), plan_(value_or_raise(without_gil([&] {
          return ReadPlan::make(*index_, held_->table, partial);
        }))) {}

  int64_t size() const { return std::ssize(plan_.reads()); }

  // FQN, whether it is an object, offsets of the item, number and offsets of the stored box;
  // offsets in the item and in the stored box, and lengths.
  py::tuple describe(int64_t number) const {
    const PlannedRead& read = at(number);
    const std::string_view fqn = items().fqn(read.item);
    return py::make_tuple(py::str(fqn.data(), fqn.size()), read.is_object,
                          to_dims(items().box(read.item).offsets), read.box, read.box_offsets,
                          read.dest_offsets, read.storage_offsets, read.lengths);
  }

  int64_t nbytes() const {
    int64_t sum = 0;
    for (const PlannedRead& read : plan_.reads()) sum += read.place.nbytes;
    return sum;
  }

  // Checks that all slices lie in their files.
  void check(const LoadJob& job) const {
    std::vector<StoredSlice> slices;
    slices.reserve(plan_.reads().size());
    for (const PlannedRead& read : plan_.reads()) {
      slices.push_back(to_slice(plan_, read, items()));
    }
    raise_if_error(without_gil([&] { return job.check(slices); }));
  }

  // What of the files is wanted for tensors, encoded.
  py::bytes wanted_bytes(LoadJob& job) const {
    std::vector<TensorRequest> requests;
    for (const PlannedRead& read : plan_.reads()) {
      const std::optional<DType> dtype = engine_dtype(read);
      if (dtype) requests.push_back(without_memory(read, *dtype));
    }
    return wanted(job, requests);
  }

  // Reads into these tensors, one for each item of the table, or hands over to `on_tensor` what
  // must be copied there: the number of the read, and its elements in the stored dtype. Returns the
  // numbers of the reads that are left to others.
  std::vector<int64_t> run(LoadJob& job, const TensorBatch& batch, const py::function& on_tensor,
                           ExchangeStream* exchange) const {
    if (std::ssize(batch.views) != items().size()) throw py::value_error("not as many as planned");
    std::vector<int64_t> numbers;
    std::vector<int64_t> left;
    std::vector<TensorRequest> requests;
    Devices devices(holder_of(exchange));
    const std::vector<bool> is_shared = shared_memory(batch);
    for (int64_t i = 0; i < size(); ++i) {
      const PlannedRead& read = at(i);
      const auto item = static_cast<size_t>(read.item);
      const TensorView& view = batch.views[item];
      const std::optional<DType> dtype = engine_dtype(read);
      if (!dtype || batch.kinds[item] == TensorKind::kTorchsOwn || is_shared[item] ||
          view.sizes != to_dims(items().box(read.item).sizes)) {
        left.push_back(i);
        continue;
      }
      const bool is_plain = batch.kinds[item] == TensorKind::kPlain && view.writable;
      numbers.push_back(i);
      if (is_plain && view.dtype == *dtype) {
        requests.push_back({to_slice(plan_, read, items()),
                            {read.storage_offsets, read.lengths},
                            narrowed(view, read, devices)});
      } else {
        requests.push_back(without_memory(read, *dtype));
      }
    }
    const auto on_request = [&](int64_t request, LoadedBytes elements) {
      on_tensor(numbers[static_cast<size_t>(request)], std::move(elements));
    };
    const LoadResult result = torch_ckpt::run(job, requests, {}, on_request, exchange);
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (result.outcomes[i] != Outcome::kLoaded) left.push_back(numbers[i]);
    }
    std::sort(left.begin(), left.end());
    return left;
  }

 private:
  const ItemTable& items() const { return held_->table; }

  const PlannedRead& at(int64_t number) const {
    if (number < 0 || number >= size()) throw py::index_error("there is no such read");
    return plan_.reads()[static_cast<size_t>(number)];
  }

  // The dtype of a read that the engine can do; nothing for what is left to torch.
  std::optional<DType> engine_dtype(const PlannedRead& read) const {
    if (read.is_object || read.is_transformed) return std::nullopt;
    return dtype_from_name(plan_.stored_dtype(read.item));
  }

  TensorRequest without_memory(const PlannedRead& read, DType dtype) const {
    LiveTensor live;
    live.dtype = dtype;
    live.sizes = read.lengths;
    live.strides = contiguous_strides(read.lengths);
    for (int64_t& stride : live.strides) stride *= itemsize(dtype);
    return {to_slice(plan_, read, items()), {read.storage_offsets, read.lengths}, std::move(live)};
  }

  LiveTensor narrowed(const TensorView& view, const PlannedRead& read, Devices& devices) const {
    LiveTensor live = devices.live(view, items().fqn(read.item));
    for (size_t d = 0; d < read.lengths.size(); ++d) {
      live.data += read.dest_offsets[d] * live.strides[d];
      live.sizes[d] = read.lengths[d];
    }
    return live;
  }

  // Of each tensor whether it has memory in common with another, as far as first and last bytes
  // tell.
  static std::vector<bool> shared_memory(const TensorBatch& batch) {
    struct Extent {
      const std::byte* begin;
      const std::byte* end;
      size_t item;
    };
    std::vector<Extent> extents;
    for (size_t item = 0; item < batch.views.size(); ++item) {
      const TensorView& view = batch.views[item];
      if (view.data == nullptr || checked_volume(view.sizes) == 0) continue;
      int64_t nbytes = itemsize(view.dtype);
      for (size_t d = 0; d < view.sizes.size(); ++d) {
        nbytes += (view.sizes[d] - 1) * view.strides[d];
      }
      extents.push_back({view.data, view.data + nbytes, item});
    }
    std::sort(extents.begin(), extents.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    std::vector<bool> out(batch.views.size());
    for (size_t i = 1, last = 0; i < extents.size(); ++i) {
      if (extents[i].begin < extents[last].end) {
        out[extents[i].item] = out[extents[last].item] = true;
      }
      if (extents[i].end > extents[last].end) last = i;  // The one that reaches farthest.
    }
    return out;
  }

  const std::shared_ptr<StoredIndex> index_;
  const std::shared_ptr<HeldTable> held_;
  const ReadPlan plan_;
};

}  // namespace

void bind_load_job(py::module_& module) {
  py::class_<LoadedBytes>(module, "LoadedBytes", py::buffer_protocol())
      .def_buffer([](LoadedBytes& bytes) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(bytes.data.get()), bytes.nbytes,
                               /*readonly=*/false);
      });
  py::class_<LoadJob>(module, "LoadJob")
      .def(py::init(&make), py::arg("fs"), py::arg("directory"), py::arg("index"),
           py::arg("buffer_nbytes"), py::arg("block_nbytes"), py::arg("threads"), py::arg("direct"),
           py::arg("verify"), py::arg("slices_are_archives"), py::keep_alive<1, 2>())
      .def("check", &check, py::arg("slices"))
      .def(
          "wanted_bytes",
          [](LoadJob& job, const std::vector<PyTensorRequest>& tensors) {
            Devices devices;
            return wanted(job, to_requests(tensors, devices));
          },
          py::arg("tensors"))
      .def("run", &run_job, py::arg("tensors"), py::arg("slices"),
           py::arg("on_tensor") = py::none(), py::arg("exchange") = nullptr);
  py::class_<Reads>(module, "Reads")
      .def(py::init<std::shared_ptr<StoredIndex>, std::shared_ptr<HeldTable>, bool>(),
           py::arg("index"), py::arg("items"), py::arg("partial"))
      .def("__len__", &Reads::size)
      .def_property_readonly("nbytes", &Reads::nbytes)
      .def("describe", &Reads::describe, py::arg("number"))
      .def("check", &Reads::check, py::arg("job"))
      .def("wanted_bytes", &Reads::wanted_bytes, py::arg("job"))
      .def("run", &Reads::run, py::arg("job"), py::arg("batch"), py::arg("on_tensor"),
           py::arg("exchange") = nullptr);
}

}  // namespace torch_ckpt
