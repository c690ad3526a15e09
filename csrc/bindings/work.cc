// Binds the steps between a plan and a data file: Work, the items that a rank writes; TensorBatch,
// the inspected tensors; and PlannedFile, the layout of the items in one file.

#include "plan/work.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/plan.h"
#include "engine/save/planned_file.h"
#include "engine/value_digest.h"
#include "plan/item_extents.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

int64_t checked(int64_t number, int64_t count) {
  if (number < 0 || number >= count) throw py::index_error("there is no such item");
  return number;
}

Work make_work(const std::shared_ptr<PyItemTable>& table,
               const std::optional<py::bytes>& assigned) {
  if (!assigned) return Work(table_of(table));
  const Assignment assignment = value_or_raise(decode_assignment(view_of(*assigned)));
  return value_or_raise(Work::assigned(table_of(table), assignment));
}

Work part(const Work& work, const std::vector<int64_t>& positions) {
  for (const int64_t position : positions) checked(position, work.size());
  return work.part(positions);
}

std::vector<int64_t> numbers(const Work& work) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < work.size(); ++i) out.push_back(work.at(i).number);
  return out;
}

// Returns position, first row and number of rows of each item of which only some rows are written.
std::vector<std::tuple<int64_t, int64_t, int64_t>> cuts(const Work& work) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> out;
  for (int64_t i = 0; i < work.size(); ++i) {
    const Work::Item& item = work.at(i);
    if (item.rows >= 0) out.emplace_back(i, item.first_row, item.rows);
  }
  return out;
}

std::vector<int64_t> nbytes(const Work& work) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < work.size(); ++i) out.push_back(work.nbytes(work.at(i)));
  return out;
}

// FQN, facts (None for an object), whether the item is a shard, offsets and sizes of the whole box,
// first row and row count of a cut tensor.
using PyItem = std::tuple<std::string, std::optional<PyFacts>, bool, Dims, Dims,
                          std::optional<std::pair<int64_t, int64_t>>>;

PyItem describe_item(const Work& work, int64_t position) {
  const Work::Item& item = work.at(checked(position, work.size()));
  const ItemTable& table = work.items();
  const BoxView box = table.box(item.number);
  std::optional<std::pair<int64_t, int64_t>> rows;
  if (item.rows >= 0) rows = {item.first_row, item.rows};
  return {std::string(table.fqn(item.number)),
          to_python(table.facts(item.number)),
          table.kind(item.number) == ItemKind::kShard,
          to_dims(box.offsets),
          to_dims(box.sizes),
          rows};
}

// Returns the positions of the tensors that the engine reads in place.
std::vector<int64_t> plain(const TensorBatch& batch) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < batch.kinds.size(); ++i) {
    if (batch.kinds[i] == TensorKind::kPlain) out.push_back(static_cast<int64_t>(i));
  }
  return out;
}

std::vector<const TensorView*> tensors_at(const TensorBatch& batch,
                                          const std::vector<int64_t>& numbers) {
  std::vector<const TensorView*> out;
  out.reserve(numbers.size());
  for (const int64_t number : numbers) {
    const TensorView& view = batch.views[static_cast<size_t>(number)];
    if (view.gpu >= 0) throw py::value_error("a tensor is on a GPU");
    out.push_back(&view);
  }
  return out;
}

// Returns the digests of the values of all tensors, 8 bytes each; zeros for a tensor that is not
// plain.
py::bytes batch_digests(const TensorBatch& batch, bool full, int threads) {
  const std::vector<int64_t> numbers = plain(batch);
  const std::vector<const TensorView*> tensors = tensors_at(batch, numbers);
  std::vector<uint64_t> out(batch.kinds.size(), kUnknownDigest);
  without_gil([&] {
    const std::vector<uint64_t> digests = value_digests(tensors, full, threads);
    for (size_t i = 0; i < numbers.size(); ++i) out[static_cast<size_t>(numbers[i])] = digests[i];
  });
  return {reinterpret_cast<const char*>(out.data()), out.size() * sizeof(uint64_t)};
}

// Returns the digests of all elements of the tensors at some positions, as pairs; zeros for one
// that is not plain.
std::vector<std::pair<uint64_t, uint64_t>> full_digests_of(const TensorBatch& batch,
                                                           const std::vector<int64_t>& positions,
                                                           int threads, int niceness) {
  std::vector<int64_t> numbers;
  std::vector<size_t> at;
  for (size_t i = 0; i < positions.size(); ++i) {
    const int64_t position = checked(positions[i], std::ssize(batch.kinds));
    if (batch.kinds[static_cast<size_t>(position)] != TensorKind::kPlain) continue;
    numbers.push_back(position);
    at.push_back(i);
  }
  const std::vector<const TensorView*> tensors = tensors_at(batch, numbers);
  std::vector<std::pair<uint64_t, uint64_t>> out(positions.size());
  const std::vector<Digest128> digests =
      nicely_without_gil(niceness, [&] { return full_digests(tensors, threads); });
  for (size_t i = 0; i < numbers.size(); ++i) out[at[i]] = {digests[i].low, digests[i].high};
  return out;
}

// Reduces each tensor to the rows that its item stores.
void cut(TensorBatch& batch, const Work& work) {
  if (std::ssize(batch.views) != work.size()) throw py::value_error("items lack a tensor");
  for (int64_t i = 0; i < work.size(); ++i) {
    const Work::Item& item = work.at(i);
    TensorView& view = batch.views[static_cast<size_t>(i)];
    if (item.rows < 0 || view.data == nullptr) continue;
    if (view.sizes.empty() || !range_within(item.first_row, item.rows, view.sizes[0])) {
      throw py::value_error("a tensor lacks the rows of its item");
    }
    cut_to_rows(item, view);
  }
}

// Marks tensors whose memory the caller supplies later, with the planned dtype and sizes.
void defer(TensorBatch& batch, const std::vector<int64_t>& positions) {
  for (const int64_t position : positions) {
    batch.kinds[static_cast<size_t>(checked(position, static_cast<int64_t>(batch.kinds.size())))] =
        TensorKind::kNeedsCopy;
  }
}

void digest_tensors(PlannedFile& file, const std::vector<uint64_t>& samples,
                    const std::vector<int64_t>& positions) {
  if (std::ssize(samples) != file.work().size()) throw py::value_error("items lack a sample");
  for (const int64_t position : positions) checked(position, file.work().size());
  file.add_digests(samples, positions);
}

void write_planned(PlannedFile& file, SaveJob& job, int64_t begin, int64_t end) {
  if (begin < 0 || begin > end || end > file.laid_out()) throw py::index_error("no such tensors");
  const Status status =
      nicely_without_gil(job.niceness(), [&] { return file.write(job, begin, end); });
  file.release(begin, end);
  raise_if_error(status);
}

}  // namespace

void bind_work(py::module_& module) {
  py::class_<Work>(module, "Work")
      .def(py::init(&make_work), py::arg("table"), py::arg("assignment") = std::nullopt)
      .def("__len__", &Work::size)
      .def("describe", &describe_item, py::arg("position"))
      .def_property_readonly("items", &numbers)
      .def_property_readonly("nbytes", &nbytes)
      .def_property_readonly("cuts", &cuts)
      .def("part", &part, py::arg("positions"));
  py::class_<TensorBatch>(module, "TensorBatch")
      .def_property_readonly("plain", &plain)
      .def("digests", &batch_digests, py::arg("full"), py::arg("threads"))
      .def("full_digests", &full_digests_of, py::arg("positions"), py::arg("threads"),
           py::arg("niceness") = 0)
      .def("cut", &cut, py::arg("work"))
      .def("defer", &defer, py::arg("positions"));
  module.def(
      "sample_of",
      [](int64_t numel, int64_t itemsize) {
        if (numel < 0 || itemsize < 1 || itemsize > kSampleBlockNbytes) {
          throw py::value_error("there is no such tensor");
        }
        Sample sample = sample_of(numel, itemsize);
        return std::pair(std::move(sample.firsts), sample.count);
      },
      py::arg("numel"), py::arg("itemsize"));
  module.def(
      "encode_extents",
      [](const std::vector<std::tuple<int64_t, int64_t, int64_t>>& extents) {
        std::vector<ItemExtent> out;
        for (const auto& [item, offset, nbytes] : extents) {
          out.push_back({item, offset, nbytes, true});
        }
        return to_bytes(encode(std::move(out)));
      },
      py::arg("extents"));
  const auto number_in = [](const PlannedFile& file, int64_t number) {
    return checked(number, file.laid_out());
  };
  py::class_<PlannedFile>(module, "PlannedFile")
      .def(py::init([](const Work& work, const TensorBatch& batch) {
             return value_or_raise(PlannedFile::make(work, batch));
           }),
           py::arg("work"), py::arg("batch"))
      .def_property_readonly("layout", &PlannedFile::layout, py::return_value_policy::copy)
      .def_property_readonly("own", &PlannedFile::own)
      .def_property_readonly("copied", &PlannedFile::copied)
      .def("__len__", &PlannedFile::laid_out)
      .def(
          "position",
          [=](const PlannedFile& file, int64_t n) { return file.position(number_in(file, n)); },
          py::arg("number"))
      .def(
          "rows", [=](const PlannedFile& file, int64_t n) { return file.rows(number_in(file, n)); },
          py::arg("number"))
      .def(
          "put",
          [=](PlannedFile& file, int64_t n, const TensorView& copy) {
            raise_if_error(file.put(number_in(file, n), copy));
          },
          py::arg("number"), py::arg("copy"))
      .def("add_digests", &digest_tensors, py::arg("samples"), py::arg("positions"))
      .def_property_readonly("digests",
                             [](const PlannedFile& file) {
                               const Bytes bytes = std::as_bytes(std::span(file.digests()));
                               return py::bytes(reinterpret_cast<const char*>(bytes.data()),
                                                bytes.size());
                             })
      .def("write", &write_planned, py::arg("job"), py::arg("begin"), py::arg("end"))
      .def(
          "extents",
          [](const PlannedFile& file,
             const std::vector<std::tuple<int64_t, int64_t, int64_t>>& appended) {
            return to_bytes(file.extents(appended));
          },
          py::arg("appended"));
}

}  // namespace torch_ckpt
