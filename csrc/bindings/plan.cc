#include "bindings/plan.h"

#include <limits>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "geometry/cover.h"
#include "geometry/flat_range.h"
#include "plan/balance.h"
#include "plan/global_plan.h"
#include "plan/own_share.h"
#include "plan/paths.h"
#include "plan/plan_wire.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// FQN, offsets and sizes of the box (None for an object), first row and row count of a cut tensor.
using PyWritten = std::tuple<py::str, std::optional<std::pair<Dims, Dims>>,
                             std::optional<std::pair<int64_t, int64_t>>>;

// FQN, facts of a tensor (None for an object), offsets and sizes of the boxes.
using PyStored =
    std::tuple<std::string, std::optional<PyFacts>, std::vector<std::pair<Dims, Dims>>>;

using PyPaths =
    std::vector<std::pair<std::string, std::vector<std::variant<std::string, int64_t>>>>;

void add_tensor(PyItemTable& items, std::string_view fqn, std::string dtype, int64_t itemsize,
                std::string memory_format, bool requires_grad, bool pin_memory, Dims sizes,
                bool is_shard, Dims offsets, Dims box_sizes, bool is_opaque) {
  const Facts facts = {.is_tensor = true,
                       .dtype = std::move(dtype),
                       .itemsize = itemsize,
                       .memory_format = std::move(memory_format),
                       .requires_grad = requires_grad,
                       .pin_memory = pin_memory,
                       .is_opaque = is_opaque,
                       .sizes = std::move(sizes)};
  raise_if_error(items.table.add_tensor(fqn, facts, is_shard ? ItemKind::kShard : ItemKind::kTensor,
                                        {std::move(offsets), std::move(box_sizes)}));
}

void set_replica(PyItemTable& items, int32_t replica) {
  if (items.table.size() == 0 || replica < 0) throw py::value_error("no item, or no replica");
  items.table.set_replica(replica);
}

// Returns the offsets and sizes of the boxes that make up a flat range.
std::vector<std::pair<Dims, Dims>> boxes_of_range(const Dims& sizes, int64_t begin, int64_t end) {
  const std::optional<int64_t> numel = checked_numel(sizes);
  if (!numel || begin < 0 || begin > end || end > *numel) {
    throw py::value_error("the range is not inside the tensor");
  }
  std::vector<std::pair<Dims, Dims>> boxes;
  for (Box& box : flat_range_to_boxes(sizes, begin, end)) {
    boxes.emplace_back(std::move(box.offsets), std::move(box.sizes));
  }
  return boxes;
}

// Offsets and sizes.
using PyBox = std::pair<Dims, Dims>;

Box to_box(const PyBox& box, size_t ndim) {
  const auto& [offsets, sizes] = box;
  bool is_box = offsets.size() == ndim && sizes.size() == ndim;
  for (size_t d = 0; is_box && d < ndim; ++d) {
    is_box = range_within(offsets[d], sizes[d], std::numeric_limits<int64_t>::max());
  }
  if (!is_box) throw py::value_error("boxes differ in dimensions, or have invalid numbers");
  return {offsets, sizes};
}

std::vector<Box> to_boxes(const std::vector<PyBox>& boxes, size_t ndim) {
  std::vector<Box> out;
  out.reserve(boxes.size());
  for (const PyBox& box : boxes) out.push_back(to_box(box, ndim));
  return out;
}

void check_cover_of(const std::string& fqn, const PyBox& wanted, const std::vector<PyBox>& stored) {
  const Box whole = to_box(wanted, wanted.first.size());
  std::vector<Box> boxes = to_boxes(stored, wanted.first.size());
  raise_if_error(without_gil([&] { return check_cover(fqn, whole, std::move(boxes)); }));
}

// Returns a part of `wanted` that is not in exactly one box, after whether it is in none. Returns
// None if there is no such part.
std::optional<std::pair<bool, PyBox>> fault_of(const PyBox& wanted,
                                               const std::vector<PyBox>& listed) {
  const Box whole = to_box(wanted, wanted.first.size());
  std::vector<Box> boxes = to_boxes(listed, wanted.first.size());
  const auto fault = without_gil([&] { return cover_fault(whole, std::move(boxes)); });
  if (!fault) return std::nullopt;
  return std::pair(fault->is_missing, PyBox(fault->at.offsets, fault->at.sizes));
}

std::vector<Bytes> views_of(const std::vector<py::bytes>& all) {
  std::vector<Bytes> views;
  views.reserve(all.size());
  for (const py::bytes& each : all) views.push_back(view_of(each));
  return views;
}

GlobalPlan make_plan(const std::vector<py::bytes>& plans, int64_t ranks_per_node, bool split,
                     bool dedup, bool whole, const std::vector<py::bytes>& digests) {
  const GlobalPlanOptions options = {
      .ranks_per_node = ranks_per_node, .split = split, .dedup = dedup, .whole = whole};
  const std::vector<Bytes> plan_views = views_of(plans);
  const std::vector<Bytes> digest_views = views_of(digests);
  return value_or_raise(
      without_gil([&] { return GlobalPlan::make(plan_views, options, digest_views); }));
}

// FQN, a few pairs of ranks whose values differ, number of such pairs.
using PyDifference = std::tuple<py::str, std::vector<std::pair<int32_t, int32_t>>, int64_t>;

std::vector<PyDifference> differences(const GlobalPlan& global) {
  std::vector<PyDifference> out;
  for (const ReplicaDifference& found : global.differences()) {
    std::vector<std::pair<int32_t, int32_t>> pairs;
    for (const RankPair& pair : found.pairs) pairs.emplace_back(pair.lowest, pair.other);
    out.emplace_back(py::str(found.fqn), std::move(pairs), found.pair_count);
  }
  return out;
}

// Returns the share of a rank: an encoded assignment of all objects and of the tensors in
// `of_tensors`, and a table of the assigned items.
std::pair<py::bytes, std::shared_ptr<PyItemTable>> share_of(const PyItemTable& source,
                                                            const py::bytes& of_tensors) {
  const Assignment tensors = value_or_raise(decode_assignment(view_of(of_tensors)));
  const Assignment own =
      value_or_raise(without_gil([&] { return own_share(source.table, tensors); }));
  ItemTable items = value_or_raise(without_gil([&] { return assigned_items(source.table, own); }));
  return {to_bytes(encode(own)), std::make_shared<PyItemTable>(std::move(items))};
}

void check_rank(const GlobalPlan& global, int64_t rank) {
  if (rank < 0 || rank >= global.rank_count()) throw py::index_error("there is no such rank");
}

// Replica set, first item, number of items.
using PyEqualReplicas = std::tuple<int32_t, int64_t, int64_t>;

std::vector<PyEqualReplicas> equal_replicas(const GlobalPlan& global, int64_t rank) {
  check_rank(global, rank);
  std::vector<PyEqualReplicas> out;
  for (const EqualReplicas& run : global.equal_replicas(rank)) {
    out.emplace_back(run.replica_set, run.first, run.count);
  }
  return out;
}

std::vector<int64_t> tensor_numbers(const PyItemTable& items) {
  std::vector<int64_t> out;
  for (int64_t item = 0; item < items.table.size(); ++item) {
    if (items.table.kind(item) != ItemKind::kObject) out.push_back(item);
  }
  return out;
}

py::bytes assignment(const GlobalPlan& global, int64_t rank) {
  check_rank(global, rank);
  return to_bytes(without_gil([&] { return encode(global.assignment(rank)); }));
}

// Returns the items that the rank writes, in the order of its plan. `plan` is the encoded table
// that the rank sent.
std::vector<PyWritten> written(const GlobalPlan& global, int64_t rank, const py::bytes& plan) {
  check_rank(global, rank);
  const ItemTable table = value_or_raise(without_gil([&] { return decode(view_of(plan)); }));
  const Assignment assignment = global.assignment(rank);
  raise_if_error(check_assignment(assignment, table));
  std::vector<PyWritten> out;
  auto cut = assignment.cuts.begin();
  for (const Run& run : assignment.runs) {
    for (int64_t item = run.first; item < run.first + run.count; ++item) {
      const std::string_view fqn = table.fqn(item);
      PyWritten written(py::str(fqn.data(), fqn.size()), std::nullopt, std::nullopt);
      if (table.kind(item) != ItemKind::kObject) {
        const BoxView box = table.box(item);
        std::get<1>(written) = {to_dims(box.offsets), to_dims(box.sizes)};
      }
      if (cut != assignment.cuts.end() && cut->item == item) {
        std::get<2>(written) = {cut->first_row, cut->rows};
        ++cut;
      }
      out.push_back(std::move(written));
    }
  }
  return out;
}

std::optional<PyStored> find_stored(const GlobalPlan& global, std::string_view fqn) {
  const StoredTable& stored = global.stored();
  const int64_t entry = stored.entries().find(fqn);
  if (entry < 0) return std::nullopt;
  std::vector<std::pair<Dims, Dims>> boxes;
  for (int64_t i = stored.first_box(entry); i < stored.first_box(entry + 1); ++i) {
    const BoxView box = stored.box(entry, i);
    boxes.emplace_back(to_dims(box.offsets), to_dims(box.sizes));
  }
  return PyStored(fqn, to_python(stored.entries().facts(entry)), std::move(boxes));
}

std::vector<std::string> stored_fqns(const GlobalPlan& global) {
  const EntryTable& entries = global.stored().entries();
  std::vector<std::string> out;
  out.reserve(static_cast<size_t>(entries.size()));
  for (int64_t i = 0; i < entries.size(); ++i) out.emplace_back(entries.fqn(i));
  return out;
}

py::bytes encode_paths(const py::dict& paths) {
  std::vector<StatePath> listed;
  listed.reserve(paths.size());
  for (const auto& [fqn, keys] : paths) {
    StatePath& path = listed.emplace_back();
    path.fqn = py::cast<std::string_view>(fqn);
    path.keys.reserve(py::len(keys));
    for (const py::handle key : keys) {
      if (PyLong_CheckExact(key.ptr())) {
        path.keys.emplace_back(py::cast<int64_t>(key));
      } else {
        path.keys.emplace_back(std::string(py::cast<std::string_view>(key)));
      }
    }
  }
  return to_bytes(value_or_raise(without_gil([&] { return encode(listed); })));
}

PyPaths decoded_paths(const py::bytes& encoded) {
  std::vector<StatePath> paths =
      value_or_raise(without_gil([&] { return decode_paths(view_of(encoded)); }));
  PyPaths out;
  out.reserve(paths.size());
  for (StatePath& path : paths) out.emplace_back(std::move(path.fqn), std::move(path.keys));
  return out;
}

}  // namespace

Status PyItemTable::add(const TensorItem& item) {
  facts_.is_tensor = true;
  facts_.dtype = item.dtype;
  facts_.itemsize = item.itemsize;
  facts_.memory_format = "contiguous_format";  // DCP records this value for every tensor.
  facts_.requires_grad = item.requires_grad;
  facts_.pin_memory = item.pin_memory;
  facts_.sizes.assign(item.sizes.begin(), item.sizes.end());
  box_.offsets.assign(item.offsets.begin(), item.offsets.end());
  box_.sizes.assign(item.box_sizes.begin(), item.box_sizes.end());
  RETURN_IF_ERROR(table.add_tensor(item.fqn, facts_,
                                   item.is_shard ? ItemKind::kShard : ItemKind::kTensor, box_));
  if (item.replica >= 0) table.set_replica(item.replica);
  return ok_status();
}

std::optional<PyFacts> to_python(const Facts& facts) {
  if (!facts.is_tensor) return std::nullopt;
  return PyFacts(facts.dtype, facts.memory_format, facts.requires_grad, facts.pin_memory,
                 facts.sizes);
}

void bind_plan(py::module_& module) {
  py::class_<TensorSink, std::shared_ptr<TensorSink>>(module, "TensorSink");
  py::class_<PyItemTable, TensorSink, std::shared_ptr<PyItemTable>>(module, "ItemTable")
      .def(py::init())
      .def_static(
          "decode",
          [](const py::bytes& encoded) {
            return std::make_shared<PyItemTable>(
                value_or_raise(without_gil([&] { return torch_ckpt::decode(view_of(encoded)); })));
          },
          py::arg("encoded"))
      .def("__len__", [](const PyItemTable& items) { return items.table.size(); })
      .def(
          "add_object",
          [](PyItemTable& items, std::string_view fqn, int64_t nbytes) {
            raise_if_error(items.table.add_object(fqn, nbytes));
          },
          py::arg("fqn"), py::arg("nbytes"))
      .def("add_tensor", &add_tensor, py::arg("fqn"), py::arg("dtype"), py::arg("itemsize"),
           py::arg("memory_format"), py::arg("requires_grad"), py::arg("pin_memory"),
           py::arg("sizes"), py::arg("is_shard"), py::arg("offsets"), py::arg("box_sizes"),
           py::arg("is_opaque") = false)
      .def("set_replica", &set_replica, py::arg("replica"))
      .def("encode",
           [](const PyItemTable& items) {
             return to_bytes(without_gil([&] { return encode(items.table); }));
           })
      .def("tensors",
           [](const PyItemTable& items) {
             return std::make_shared<PyItemTable>(
                 without_gil([&] { return tensors_of(items.table); }));
           })
      .def_property_readonly("tensor_numbers", &tensor_numbers)
      .def("share", &share_of, py::arg("of_tensors"));
  py::class_<GlobalPlan, std::shared_ptr<GlobalPlan>>(module, "GlobalPlan")
      .def(py::init(&make_plan), py::arg("plans"), py::arg("ranks_per_node"),
           py::arg("split") = true, py::arg("dedup") = true, py::arg("whole") = true,
           py::arg("digests") = std::vector<py::bytes>())
      .def_property_readonly("fqns", &stored_fqns)
      .def_property_readonly("box_count",
                             [](const GlobalPlan& global) { return global.stored().box_count(); })
      .def("__len__", [](const GlobalPlan& global) { return global.stored().entries().size(); })
      .def("find", &find_stored, py::arg("fqn"))
      .def("assignment", &assignment, py::arg("rank"))
      .def_property_readonly("differences", &differences)
      .def("equal_replicas", &equal_replicas, py::arg("rank"))
      .def("written", &written, py::arg("rank"), py::arg("plan"));
  module.def("encode_paths", &encode_paths, py::arg("paths"));
  module.def("decode_paths", &decoded_paths, py::arg("encoded"));
  module.def(
      "balance_files",
      [](const std::vector<int64_t>& nbytes, int64_t count) {
        if (count < 1) throw py::value_error("there is no file to write to");
        return balance_files(nbytes, count);
      },
      py::arg("nbytes"), py::arg("count"));
  module.def("flat_range_to_boxes", &boxes_of_range, py::arg("sizes"), py::arg("begin"),
             py::arg("end"));
  module.def("check_cover", &check_cover_of, py::arg("fqn"), py::arg("wanted"), py::arg("stored"));
  module.def("cover_fault", &fault_of, py::arg("wanted"), py::arg("boxes"));
}

}  // namespace torch_ckpt
