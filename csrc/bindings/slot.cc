// Binds Slot, shared memory that a rank fills with a snapshot. The agent or a restarted rank reads
// the snapshot as a StoredSnapshot.

#include "engine/save/slot.h"

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <filesystem>

#include "base/xxh3.h"
#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"
#include "bindings/plan.h"
#include "io/shared_memory.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

py::bytes from_id(const SlotId& id) {
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

SlotId to_id(const py::bytes& bytes) {
  const Bytes from = view_of(bytes);
  SlotId id;
  if (from.size() != id.size()) throw py::value_error("an id has 16 bytes");
  std::ranges::copy(from, id.begin());
  return id;
}

void bind_header(py::module_& module) {
  py::class_<SlotHeader> header(module, "SlotHeader");
  const auto def_id = [&header](const char* name, SlotId SlotHeader::*id) {
    header.def_property(
        name, [id](const SlotHeader& h) { return from_id(h.*id); },
        [id](SlotHeader& h, const py::bytes& bytes) { h.*id = to_id(bytes); });
  };
  header.def(py::init([](const py::kwargs& fields) {
    const py::object made = py::cast(SlotHeader());
    for (const auto& [name, value] : fields) py::setattr(made, name, value);
    return made.cast<SlotHeader>();
  }));
  def_id("run", &SlotHeader::run);
  def_id("session", &SlotHeader::session);
  header.def_readwrite("sequence", &SlotHeader::sequence)
      .def_readwrite("step", &SlotHeader::step)
      .def_readwrite("rank", &SlotHeader::rank)
      .def_readwrite("world_size", &SlotHeader::world_size)
      .def_readwrite("node", &SlotHeader::node)
      .def_readwrite("node_count", &SlotHeader::node_count)
      .def_readwrite("ranks_here", &SlotHeader::ranks_here)
      .def_readwrite("persist", &SlotHeader::persist);
  def_id("tensors_id", &SlotHeader::tensors_id);
  def_id("share", &SlotHeader::share);
  header
      .def_property_readonly(
          "save",
          [](const SlotHeader& h) { return py::make_tuple(from_id(h.session), h.sequence); })
      .def(py::self == py::self);
}

// Number of the item, offset, nbytes, whether the bytes are the elements of a tensor.
using PyItemExtent = std::tuple<int64_t, int64_t, int64_t, bool>;

py::bytes encode_table(const std::string& directory, const std::string& version, bool sync,
                       const py::bytes& items, const std::optional<py::bytes>& paths,
                       const std::vector<PyItemExtent>& extents) {
  const auto copy = [](const py::bytes& from) {
    const Bytes bytes = view_of(from);
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  SlotTable table = {.directory = directory,
                     .version = version,
                     .sync = sync,
                     .items = copy(items),
                     .paths = {},
                     .extents = {}};
  if (paths) table.paths = copy(*paths);
  std::vector<ItemExtent> item_extents;
  for (const auto& [item, offset, nbytes, plain] : extents) {
    if (item < 0 || offset < 0 || nbytes < 0) throw py::value_error("an extent is negative");
    item_extents.push_back({item, offset, nbytes, plain});
  }
  table.extents = encode(std::move(item_extents));
  return to_bytes(encode(table));
}

// A snapshot and its slot. The slot stays mapped while any view of the snapshot exists.
struct PyStoredSnapshot {
  std::shared_ptr<Slot> slot;
  StoredSnapshot found;

  Bytes bytes(int64_t item) const {
    const ItemExtent& extent = found.extents.at(static_cast<size_t>(item));
    return slice(Bytes(slot->bytes()), extent.offset, extent.nbytes);
  }
};

// Returns the items with these numbers as a batch. An item that is not the elements of a tensor has
// the kind kTorchOnly.
TensorBatch batch_of(const PyStoredSnapshot& snapshot, const std::vector<int64_t>& numbers) {
  TensorBatch batch;
  for (const int64_t item : numbers) {
    TensorView& view = batch.views.emplace_back();
    const Bytes bytes = snapshot.bytes(item);
    const Facts& facts = snapshot.found.items.facts(item);
    const auto dtype = dtype_from_name(facts.dtype);
    if (!snapshot.found.extents[static_cast<size_t>(item)].plain || !dtype) {
      batch.kinds.push_back(TensorKind::kTorchOnly);
      continue;
    }
    batch.kinds.push_back(TensorKind::kPlain);
    view.dtype = *dtype;
    view.sizes = to_dims(snapshot.found.items.box(item).sizes);
    view.strides = contiguous_strides(view.sizes);
    for (int64_t& stride : view.strides) stride *= itemsize(*dtype);
    view.data = const_cast<std::byte*>(bytes.data());
    view.storage = snapshot.slot;
  }
  return batch;
}

std::vector<PyItemExtent> item_extents(const PyStoredSnapshot& snapshot) {
  std::vector<PyItemExtent> out;
  for (const ItemExtent& extent : snapshot.found.extents) {
    out.emplace_back(extent.item, extent.offset, extent.nbytes, extent.plain);
  }
  return out;
}

// The last owner of a removed file frees its memory: gigabytes take seconds.
std::shared_ptr<Slot> freed_without_gil(std::unique_ptr<Slot> slot) {
  return {slot.release(), [](Slot* last) {
            if (PyGILState_Check() == 0) {
              delete last;
              return;
            }
            const py::gil_scoped_release released;
            delete last;
          }};
}

}  // namespace

void bind_slot(py::module_& module) {
  bind_header(module);
  py::class_<Slot, Snapshot, std::shared_ptr<Slot>>(module, "Slot")
      .def_static(
          "create",
          [](const std::filesystem::path& path, int64_t nbytes) {
            return freed_without_gil(
                value_or_raise(without_gil([&] { return Slot::create(path.string(), nbytes); })));
          },
          py::arg("path"), py::arg("nbytes"))
      .def_static(
          "open",
          [](const std::filesystem::path& path, bool writable, bool at_hand) {
            return freed_without_gil(value_or_raise(
                without_gil([&] { return Slot::open(path.string(), writable, at_hand); })));
          },
          py::arg("path"), py::arg("writable"), py::arg("at_hand") = false)
      .def(
          "begin",
          [](Slot& slot, const SlotHeader& header, const py::bytes& table, int64_t nbytes) {
            raise_if_error(slot.begin(header, view_of(table), nbytes));
          },
          py::arg("header"), py::arg("table"), py::arg("payload_nbytes"))
      .def(
          "put",
          [](Slot& slot, int64_t offset, const py::buffer& data) {
            const py::buffer_info info = data.request();
            raise_if_error(slot.put(offset, bytes_of(info)));
          },
          py::arg("offset"), py::arg("data"))
      .def("complete", &Slot::complete)
      .def("clear", &Slot::clear)
      .def("header", [](const Slot& slot) { return value_or_raise(slot.header()); })
      .def("read", [](const std::shared_ptr<Slot>& slot) {
        return PyStoredSnapshot{slot, value_or_raise(without_gil([&] { return slot->read(); }))};
      });
  py::class_<PyStoredSnapshot>(module, "StoredSnapshot")
      .def_property_readonly("header", [](const PyStoredSnapshot& s) { return s.found.header; })
      .def_property_readonly(
          "directory", [](const PyStoredSnapshot& s) { return py::bytes(s.found.table.directory); })
      .def_property_readonly(
          "version", [](const PyStoredSnapshot& s) { return to_text(s.found.table.version); })
      .def_property_readonly("sync", [](const PyStoredSnapshot& s) { return s.found.table.sync; })
      .def_property_readonly(
          "items", [](const PyStoredSnapshot& s) { return to_bytes(s.found.table.items); })
      .def_property_readonly("paths",
                             [](const PyStoredSnapshot& s) -> std::optional<py::bytes> {
                               if (!s.found.table.paths) return std::nullopt;
                               return to_bytes(*s.found.table.paths);
                             })
      .def_property_readonly("extents", &item_extents)
      .def("batch", &batch_of, py::arg("items"))
      .def(
          "object_bytes",
          [](const PyStoredSnapshot& s, int64_t item) {
            const Bytes bytes = s.bytes(item);
            return py::memoryview::from_memory(bytes.data(), ssize(bytes));
          },
          py::arg("item"), py::keep_alive<0, 1>());
  module.def("encode_slot_table", &encode_table, py::arg("directory"), py::arg("version"),
             py::arg("sync"), py::arg("items"), py::arg("paths"), py::arg("extents"));
  module.def(
      "is_in_memory",
      [](const std::filesystem::path& directory) {
        return value_or_raise(is_in_memory(directory.string()));
      },
      py::arg("directory"));
  module.def("slot_nbytes", &Slot::needed_nbytes, py::arg("table_nbytes"),
             py::arg("payload_nbytes"));
  module.def(
      "xxh3",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request();
        return without_gil([&] { return xxh3(bytes_of(info)); });
      },
      py::arg("data"));
}

}  // namespace torch_ckpt
