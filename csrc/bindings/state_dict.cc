#include "bindings/state_dict.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace torch_ckpt {
namespace {

void raise_if_refused(const Status& status) {
  if (!status.ok()) throw py::value_error(status.message());
}

// One level of recursion, counted against the interpreter's limit. Raises RecursionError beyond it.
class Level {
 public:
  Level() {
    if (Py_EnterRecursiveCall(" in a nested state dict") != 0) throw py::error_already_set();
  }
  ~Level() { Py_LeaveRecursiveCall(); }
};

// A copy of the keys and values of a dict. Iteration may run Python code that changes the dict.
class Entries {
 public:
  explicit Entries(py::handle dict)
      : keys_(py::reinterpret_steal<py::list>(PyDict_Keys(dict.ptr()))),
        values_(py::reinterpret_steal<py::list>(PyDict_Values(dict.ptr()))) {}

  py::ssize_t size() const { return PyList_GET_SIZE(keys_.ptr()); }
  py::handle key(py::ssize_t i) const { return PyList_GET_ITEM(keys_.ptr(), i); }
  py::handle value(py::ssize_t i) const { return PyList_GET_ITEM(values_.ptr(), i); }

 private:
  const py::list keys_;
  const py::list values_;
};

class Flattener {
 public:
  Flattener() : mapping_(py::module_::import("collections.abc").attr("Mapping")) {}

  py::tuple flatten(const py::object& state_dict) {
    visit_mapping(py::tuple(), py::str(), state_dict);
    return py::make_tuple(flat_, paths_);
  }

 private:
  bool is_mapping(py::handle value) const {
    if (PyDict_Check(value.ptr())) return true;
    if (is_tensor(value)) return false;
    return py::isinstance(value, mapping_);
  }

  // Returns whether a list is stored as one value: it has no tensor and no mapping at any depth.
  bool is_terminal(const py::list& list) const {
    const Level level;
    for (const py::handle entry : py::tuple(list)) {
      if (is_tensor(entry) || is_mapping(entry)) return false;
      if (py::isinstance<py::list>(entry) &&
          !is_terminal(py::reinterpret_borrow<py::list>(entry))) {
        return false;
      }
    }
    return true;
  }

  // `prefix` is the prefix of the FQNs in `value`. It ends with a dot unless it is empty.
  void visit_mapping(const py::tuple& path, const py::str& prefix, const py::object& value) {
    const Level level;
    if (PyDict_CheckExact(value.ptr())) {
      const Entries entries(value);
      for (py::ssize_t i = 0; i < entries.size(); ++i) {
        visit(path, prefix, to_text_of(entries.key(i)), entries.value(i), true);
      }
      return;
    }
    for (const py::handle item : value.attr("items")()) {
      const auto pair = py::cast<py::tuple>(item);
      visit(path, prefix, to_text_of(pair[0]), pair[1], true);
    }
  }

  void visit_list(const py::tuple& path, const py::str& prefix, const py::list& list) {
    const Level level;
    py::ssize_t number = 0;
    for (const py::handle entry : py::tuple(list)) {  // A copy: visits may run Python code.
      visit(path, prefix, py::int_(number), entry, false);
      ++number;
    }
  }

  static py::object to_text_of(py::handle key) {
    if (PyUnicode_CheckExact(key.ptr())) return py::reinterpret_borrow<py::object>(key);
    PyObject* text = PyObject_Str(key.ptr());
    if (text == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(text);
  }

  static py::str joined(const py::str& a, py::handle b) {
    PyObject* text = PyUnicode_Concat(a.ptr(), b.ptr());
    if (text == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::str>(text);
  }

  static py::tuple longer(const py::tuple& path, const py::object& key) {
    const auto length = static_cast<py::ssize_t>(path.size());
    py::tuple out(path.size() + 1);
    for (py::ssize_t i = 0; i < length; ++i) {
      PyObject* entry = PyTuple_GET_ITEM(path.ptr(), i);
      Py_INCREF(entry);
      PyTuple_SET_ITEM(out.ptr(), i, entry);
    }
    PyTuple_SET_ITEM(out.ptr(), length, key.inc_ref().ptr());
    return out;
  }

  void visit(const py::tuple& parent, const py::str& prefix, const py::object& key,
             py::handle value, bool is_text) {
    const py::object word = is_text ? key : py::str(key);
    const py::str fqn = PyUnicode_GET_LENGTH(prefix.ptr()) == 0
                            ? py::reinterpret_borrow<py::str>(word)
                            : joined(prefix, word);
    py::tuple path = longer(parent, key);
    if (!is_tensor(value)) {
      const auto object = py::reinterpret_borrow<py::object>(value);
      if (is_mapping(value)) return visit_mapping(path, joined(fqn, dot_), object);
      if (py::isinstance<py::list>(value)) {
        const auto list = py::reinterpret_borrow<py::list>(value);
        if (!is_terminal(list)) return visit_list(path, joined(fqn, dot_), list);
      }
    }
    const auto count = flat_.size();
    if (PyDict_SetDefault(flat_.ptr(), fqn.ptr(), value.ptr()) == nullptr) {
      throw py::error_already_set();
    }
    if (flat_.size() == count) {
      throw py::value_error("duplicated flatten key " + std::string(fqn));
    }
    if (PyDict_SetItem(paths_.ptr(), fqn.ptr(), path.ptr()) != 0) throw py::error_already_set();
  }

  const py::object mapping_;
  const py::str dot_ = ".";
  py::dict flat_;
  py::dict paths_;
};

std::string_view utf8_of(py::handle text) {
  py::ssize_t nbytes = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<size_t>(nbytes)};
}

// Returns the value that DCP records for a DTensor: requires_grad of the result of `to_local`.
bool local_requires_grad(py::handle dtensor, py::handle local) {
  if (is_grad_enabled()) return requires_grad(dtensor);
  return requires_grad(local) && requires_grad(dtensor.attr("to_local")());
}

constexpr std::array<int64_t, 64> kZeros = {};

// Interned once: attribute access is fastest by the interned name.
struct AttributeNames {
  PyObject* local = PyUnicode_InternFromString("_local_tensor");
  PyObject* spec = PyUnicode_InternFromString("_spec");
  PyObject* mesh = PyUnicode_InternFromString("mesh");
  PyObject* placements = PyUnicode_InternFromString("placements");
  PyObject* dim = PyUnicode_InternFromString("dim");
};

const AttributeNames& attribute_names() {
  static const AttributeNames names;
  return names;
}

// Whether a tensor has attributes in Python. DCP may plan such a tensor by them, as a set of boxes
// of another tensor. Most tensors have none.
bool has_attributes(py::handle tensor) {
  PyObject** attributes = _PyObject_GetDictPtr(tensor.ptr());
  return attributes != nullptr && *attributes != nullptr && PyDict_Size(*attributes) > 0;
}

// Returns the item of a tensor without attributes in Python that the engine can store.
std::optional<TensorItem> plain_item(py::handle object) {
  if (!is_tensor(object) || has_attributes(object)) return std::nullopt;
  return describe(object);
}

}  // namespace

py::tuple flatten(const py::object& state_dict) { return Flattener().flatten(state_dict); }

ShardBoxes::ShardBoxes(py::type dtensor, py::type shard, py::type replicate, py::function box_of)
    : dtensor_(std::move(dtensor)),
      shard_(std::move(shard)),
      replicate_(std::move(replicate)),
      box_of_(std::move(box_of)) {}

py::object ShardBoxes::local_of(py::handle object) const {
  if (!py::type::handle_of(object).is(dtensor_)) return {};
  py::object local = py::getattr(object, attribute_names().local);
  return is_plannable(local) && !has_attributes(local) ? local : py::object();
}

int64_t ShardBoxes::number_of(py::handle object) {
  // The key includes the class: some versions of torch have equal placements of different classes.
  const py::tuple key = py::make_tuple(py::type::handle_of(object), object);
  const py::int_ next(numbers_.size());
  PyObject* number = PyDict_SetDefault(numbers_.ptr(), key.ptr(), next.ptr());
  if (number == nullptr) throw py::error_already_set();
  return py::cast<int64_t>(py::handle(number));
}

void ShardBoxes::add_placement(py::handle placement) {
  const py::handle type = py::type::handle_of(placement);
  if (type.is(replicate_)) {
    key_.insert(key_.end(), {0, 0});
  } else if (type.is(shard_)) {
    key_.insert(key_.end(), {1, py::cast<int64_t>(py::getattr(placement, attribute_names().dim))});
  } else {
    key_.insert(key_.end(), {2, number_of(placement)});
  }
}

const ShardBox* ShardBoxes::find(py::handle dtensor) {
  const py::object spec = py::getattr(dtensor, attribute_names().spec);
  const py::object mesh = py::getattr(spec, attribute_names().mesh);
  if (!mesh.is(mesh_)) {
    mesh_number_ = number_of(mesh);
    mesh_ = mesh;
  }
  const py::tuple placements = py::getattr(spec, attribute_names().placements);
  const std::span<const int64_t> sizes = sizes_of(dtensor);
  key_.assign({mesh_number_, static_cast<int64_t>(placements.size())});
  for (const py::handle placement : placements) add_placement(placement);
  key_.insert(key_.end(), sizes.begin(), sizes.end());
  auto known = boxes_.find(key_);
  if (known == boxes_.end()) {
    auto box = py::cast<std::optional<ShardBox>>(box_of_(dtensor));
    known = boxes_.emplace(key_, std::move(box)).first;
  }
  return known->second ? &*known->second : nullptr;
}

py::list list_tensors(const py::dict& flat, TensorSink& sink, ShardBoxes& boxes,
                      const py::function& other) {
  py::list sources;
  const auto add = [&](py::handle fqn, py::handle stored, TensorItem tensor) {
    tensor.fqn = utf8_of(fqn);
    raise_if_refused(sink.add(tensor));
    sources.append(stored);
  };
  const Entries entries(flat);
  for (py::ssize_t i = 0; i < entries.size(); ++i) {
    const py::handle fqn = entries.key(i);
    const py::handle value = entries.value(i);
    if (std::optional<TensorItem> tensor = plain_item(value)) {
      if (tensor->sizes.size() > kZeros.size()) throw py::value_error("too many dimensions");
      tensor->offsets = std::span(kZeros).first(tensor->sizes.size());
      tensor->box_sizes = tensor->sizes;
      add(fqn, value, *tensor);
      continue;
    }
    const py::object local = boxes.local_of(value);
    const ShardBox* box = local ? boxes.find(value) : nullptr;
    if (box != nullptr) {
      TensorItem shard = *describe(local);
      shard.requires_grad = local_requires_grad(value, local);
      shard.is_shard = true;
      shard.sizes = box->sizes;
      shard.offsets = box->offsets;
      shard.box_sizes = box->box_sizes;
      shard.replica = box->replica;
      add(fqn, local, shard);
      continue;
    }
    for (const py::handle source : py::cast<py::list>(other(fqn, value))) sources.append(source);
  }
  return sources;
}

}  // namespace torch_ckpt
