// Planned items on their way to a data file: what a rank writes (Work), and what it writes to one
// file once its tensors were looked at (PlannedFile).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/plan.h"
#include "engine/restored_plan.h"
#include "engine/save_job.h"
#include "plan/assignment.h"
#include "plan/item_extents.h"
#include "plan/plan_wire.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Some items of a table, of some of them only rows.
class Work {
 public:
  struct Item {
    int64_t number = 0;  // In the table.
    int64_t first_row = 0;
    int64_t rows = -1;      // All.
    int64_t reported = -1;  // As which item it is reported to the coordinator; -1: as `number`.
  };

  // All items, or those that an encoded assignment has.
  Work(std::shared_ptr<const HeldTable> table, const std::optional<py::bytes>& assigned)
      : table_(std::move(table)) {
    if (!assigned) {
      for (int64_t i = 0; i < items().size(); ++i) items_.push_back({i});
      return;
    }
    assign(value_or_raise(decode_assignment(view_of(*assigned))));
  }

  // What a rank has written of them, in a former save.
  Work(std::shared_ptr<const HeldTable> table, const StoredIndex& index, int64_t rank)
      : table_(std::move(table)) {
    const RestoredWork restored =
        value_or_raise(without_gil([&] { return restore_work(index, items(), rank); }));
    assign(restored.assignment);
    for (size_t i = 0; i < items_.size(); ++i) items_[i].reported = restored.numbers[i];
  }

  // Those at these positions.
  Work(const Work& all, const std::vector<int64_t>& positions) : table_(all.table_) {
    for (const int64_t at : positions) items_.push_back(all.at(at));
  }

  const ItemTable& items() const { return table_->table; }
  int64_t size() const { return std::ssize(items_); }

  const Item& at(int64_t position) const {
    if (position < 0 || position >= size()) throw py::index_error("there is no such item");
    return items_[static_cast<size_t>(position)];
  }

  // The box that is written. Requires: it is a tensor.
  Box box(const Item& item) const {
    const BoxView whole = items().box(item.number);
    return item.rows < 0 ? to_box(whole) : cut_box(whole, {item.number, item.first_row, item.rows});
  }

  int64_t nbytes(const Item& item) const {
    const int64_t all = items().nbytes(item.number);
    if (item.rows < 0 || all == 0) return all;
    return all / items().box(item.number).sizes[0] * item.rows;
  }

 private:
  void assign(const Assignment& assignment) {
    raise_if_error(check_assignment(assignment, items()));
    auto cut = assignment.cuts.begin();
    for (const Run& run : assignment.runs) {
      for (int64_t i = run.first; i < run.first + run.count; ++i) {
        Item& item = items_.emplace_back(Item{i});
        if (cut == assignment.cuts.end() || cut->item != i) continue;
        item.first_row = cut->first_row;
        item.rows = cut->rows;
        ++cut;
      }
    }
  }

  std::shared_ptr<const HeldTable> table_;
  std::vector<Item> items_;
};

std::vector<int64_t> numbers(const Work& work) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < work.size(); ++i) out.push_back(work.at(i).number);
  return out;
}

std::vector<int64_t> nbytes(const Work& work) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < work.size(); ++i) out.push_back(work.nbytes(work.at(i)));
  return out;
}

// FQN; of a tensor its facts, whether it is a shard, and offsets and sizes of its whole box; of a
// cut tensor its first row and how many.
using PyItem = std::tuple<std::string, std::optional<PyFacts>, bool, Dims, Dims,
                          std::optional<std::pair<int64_t, int64_t>>>;

// Positions of the tensors that the engine reads where they are.
std::vector<int64_t> plain(const TensorBatch& batch) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < batch.kinds.size(); ++i) {
    if (batch.kinds[i] == TensorKind::kPlain) out.push_back(static_cast<int64_t>(i));
  }
  return out;
}

PyItem describe(const Work& work, int64_t position) {
  const Work::Item& item = work.at(position);
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

// Tensors of one data file: laid out, then written.
class PlannedFile {
 public:
  // Of `work`, whose tensors are in `batch`: all that are not torch's own.
  PlannedFile(Work work, const TensorBatch& batch) : work_(std::move(work)) {
    if (std::ssize(batch.views) != work_.size()) throw py::value_error("not as many as planned");
    std::vector<SliceNbytes> slices;
    for (int64_t at = 0; at < work_.size(); ++at) {
      const TensorKind kind = batch.kinds[static_cast<size_t>(at)];
      if (kind == TensorKind::kTorchsOwn) {
        own_.push_back(at);
        continue;
      }
      if (kind == TensorKind::kNeedsCopy) copied_.push_back(laid_out());
      positions_.push_back(at);
      views_.push_back(narrowed(at, batch.views[static_cast<size_t>(at)]));
      slices.push_back(value_or_raise(slice_nbytes(views_.back().dtype, views_.back().sizes)));
    }
    layout_ = lay_out(slices);
  }

  int64_t laid_out() const { return std::ssize(views_); }
  const Layout& layout() const { return layout_; }
  const std::vector<int64_t>& own() const { return own_; }        // Positions in the work.
  const std::vector<int64_t>& copied() const { return copied_; }  // Numbers in the layout.
  int64_t position(int64_t number) const { return positions_.at(static_cast<size_t>(number)); }

  // The rows that are written of a tensor that is cut.
  std::optional<std::pair<int64_t, int64_t>> rows(int64_t number) const {
    const Work::Item& item = work_.at(position(number));
    if (item.rows < 0) return std::nullopt;
    return std::pair(item.first_row, item.rows);
  }

  // Gives memory to one that had none: a copy of what is written of it.
  void put(int64_t number, const TensorView& copy) {
    TensorView& view = views_.at(static_cast<size_t>(number));
    if (copy.dtype != view.dtype || copy.sizes != view.sizes) {
      throw py::value_error("a copy differs from its tensor");
    }
    view = copy;
  }

  // Writes tensors [begin, end) in the order of the layout, and lets go of their memory.
  void write(SaveJob& job, int64_t begin, int64_t end) {
    if (begin < 0 || begin > end || end > laid_out()) throw py::index_error("no such tensors");
    raise_if_error(nicely_without_gil(job.niceness(), [&] {
      Status status;
      for (int64_t i = begin; i < end && status.ok(); ++i) {
        const TensorView& view = views_[static_cast<size_t>(i)];
        LiveTensor live = to_live(view);
        live.name = work_.items().fqn(work_.at(position(i)).number);
        if (live.data == nullptr && checked_volume(view.sizes) != 0) {
          status = internal_error("'", live.name, "' has no memory to write");
          break;
        }
        status = job.write(i, live);
      }
      const Status settled = job.settle();
      return status.ok() ? settled : status;
    }));
    for (int64_t i = begin; i < end; ++i) views_[static_cast<size_t>(i)].storage.reset();
  }

  // Where everything is: what was laid out, and besides that position, offset and length.
  py::bytes extents(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& appended) const {
    std::vector<ItemExtent> out;
    out.reserve(views_.size() + appended.size());
    for (int64_t i = 0; i < laid_out(); ++i) {
      const Slice& slice = layout_.slices[static_cast<size_t>(i)];
      out.push_back({reported(position(i)), slice.offset, slice.total_nbytes(), true});
    }
    for (const auto& [at, offset, length] : appended) {
      out.push_back({reported(at), offset, length, false});
    }
    return to_bytes(encode(std::move(out)));
  }

 private:
  int64_t reported(int64_t at) const {
    const Work::Item& item = work_.at(at);
    return item.reported < 0 ? item.number : item.reported;
  }

  // The rows that are written of a tensor, once it was found to be what was planned.
  TensorView narrowed(int64_t at, TensorView view) const {
    const Work::Item& item = work_.at(at);
    const BoxView whole = work_.items().box(item.number);
    const Facts& facts = work_.items().facts(item.number);
    if (dtype_info(view.dtype).name != facts.dtype || view.sizes != to_dims(whole.sizes)) {
      raise_if_error(invalid_argument(
          "cannot write '", work_.items().fqn(item.number), "': it was planned as ", facts.dtype,
          " of sizes ", to_string(to_dims(whole.sizes)), ", and is ", dtype_info(view.dtype).name,
          " of sizes ", to_string(view.sizes)));
    }
    if (item.rows < 0) return view;
    if (view.data != nullptr) view.data += item.first_row * view.strides[0];
    view.sizes[0] = item.rows;
    return view;
  }

  const Work work_;
  std::vector<int64_t> positions_;  // In the work, of what is laid out.
  std::vector<TensorView> views_;   // Of the same.
  std::vector<int64_t> own_;
  std::vector<int64_t> copied_;
  Layout layout_;
};

}  // namespace

void bind_work(py::module_& module) {
  py::class_<Work>(module, "Work")
      .def(py::init([](std::shared_ptr<HeldTable> table, const std::optional<py::bytes>& assigned) {
             return Work(std::move(table), assigned);
           }),
           py::arg("table"), py::arg("assignment") = std::nullopt)
      .def_static(
          "restored",
          [](std::shared_ptr<HeldTable> table, const StoredIndex& index, int64_t rank) {
            return Work(std::move(table), index, rank);
          },
          py::arg("table"), py::arg("index"), py::arg("rank"))
      .def("__len__", &Work::size)
      .def("describe", &describe, py::arg("position"))
      .def_property_readonly("items", &numbers)
      .def_property_readonly("nbytes", &nbytes)
      .def(
          "part",
          [](const Work& work, const std::vector<int64_t>& positions) {
            return Work(work, positions);
          },
          py::arg("positions"));
  py::class_<TensorBatch>(module, "TensorBatch").def_property_readonly("plain", &plain);
  py::class_<PlannedFile>(module, "PlannedFile")
      .def(py::init<Work, const TensorBatch&>(), py::arg("work"), py::arg("batch"))
      .def_property_readonly("layout", &PlannedFile::layout, py::return_value_policy::copy)
      .def_property_readonly("own", &PlannedFile::own)
      .def_property_readonly("copied", &PlannedFile::copied)
      .def("__len__", &PlannedFile::laid_out)
      .def("position", &PlannedFile::position, py::arg("number"))
      .def("rows", &PlannedFile::rows, py::arg("number"))
      .def("put", &PlannedFile::put, py::arg("number"), py::arg("copy"))
      .def("write", &PlannedFile::write, py::arg("job"), py::arg("begin"), py::arg("end"))
      .def("extents", &PlannedFile::extents, py::arg("appended"));
}

}  // namespace torch_ckpt
