#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "plan/balance.h"
#include "plan/global_plan.h"
#include "plan/plan_wire.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// FQN; offsets and sizes of the box (of an object None); of a cut tensor its first row and how
// many.
using PyWritten = std::tuple<py::str, std::optional<std::pair<Dims, Dims>>,
                             std::optional<std::pair<int64_t, int64_t>>>;

py::bytes to_bytes(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Bytes view_of(const py::bytes& bytes) { return as_bytes(static_cast<std::string_view>(bytes)); }

void add_tensor(ItemTable& table, std::string_view fqn, std::string dtype, int64_t itemsize,
                std::string memory_format, bool requires_grad, bool pin_memory, Dims sizes,
                bool is_shard, Dims offsets, Dims box_sizes) {
  const Facts facts = {.is_tensor = true,
                       .dtype = std::move(dtype),
                       .itemsize = itemsize,
                       .memory_format = std::move(memory_format),
                       .requires_grad = requires_grad,
                       .pin_memory = pin_memory,
                       .sizes = std::move(sizes)};
  raise_if_error(table.add_tensor(fqn, facts, is_shard ? ItemKind::kShard : ItemKind::kTensor,
                                  {std::move(offsets), std::move(box_sizes)}));
}

GlobalPlan make_plan(const std::vector<py::bytes>& plans, int64_t ranks_per_node) {
  std::vector<Bytes> views;
  views.reserve(plans.size());
  for (const py::bytes& plan : plans) views.push_back(view_of(plan));
  return value_or_raise(
      without_gil([&] { return GlobalPlan::make(views, {.ranks_per_node = ranks_per_node}); }));
}

// What a rank that has sent `plan` is to write, in the order of its plan.
std::vector<PyWritten> written(const GlobalPlan& global, int64_t rank, const py::bytes& plan) {
  if (rank < 0 || rank >= global.rank_count()) throw py::index_error("there is no such rank");
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

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<ItemTable>(module, "ItemTable")
      .def(py::init())
      .def("__len__", &ItemTable::size)
      .def(
          "add_object",
          [](ItemTable& table, std::string_view fqn, int64_t nbytes) {
            raise_if_error(table.add_object(fqn, nbytes));
          },
          py::arg("fqn"), py::arg("nbytes"))
      .def("add_tensor", &add_tensor, py::arg("fqn"), py::arg("dtype"), py::arg("itemsize"),
           py::arg("memory_format"), py::arg("requires_grad"), py::arg("pin_memory"),
           py::arg("sizes"), py::arg("is_shard"), py::arg("offsets"), py::arg("box_sizes"))
      .def("encode", [](const ItemTable& table) {
        return to_bytes(without_gil([&] { return encode(table); }));
      });
  py::class_<GlobalPlan>(module, "GlobalPlan")
      .def(py::init(&make_plan), py::arg("plans"), py::arg("ranks_per_node"))
      .def_property_readonly("load", &GlobalPlan::load)
      .def("written", &written, py::arg("rank"), py::arg("plan"));
  module.def(
      "balance_files",
      [](const std::vector<int64_t>& nbytes, int64_t count) {
        if (count < 1) throw py::value_error("there is no file to write to");
        return balance_files(nbytes, count);
      },
      py::arg("nbytes"), py::arg("count"));
}

}  // namespace torch_ckpt
