// The extension module torch_ckpt._core._tensor_view: reads tensors of torch through functions of
// libtorch (torch_library.h) and Python attributes. The other module, torch_ckpt._core._native,
// also works in programs without torch.

#include "bindings/tensor_view.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/writable_memory.h"
#include "bindings/gil.h"
#include "bindings/peers.h"
#include "bindings/state_dict.h"
#include "bindings/torch_library.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

PyObject* imported(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

// What this module uses of torch's Python interface. Never freed, since modules are not.
struct TorchNames {
  PyObject* tensor = imported("torch", "Tensor");
  PyObject* parameter = imported("torch.nn", "Parameter");
  PyObject* is_grad_enabled = imported("torch", "is_grad_enabled");
  // Interned: attribute access is fastest by the interned name.
  PyObject* cdata = PyUnicode_InternFromString("_cdata");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
};

const TorchNames& names() {
  static const TorchNames names;
  return names;
}

py::object checked(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// Returns whether an object is a Tensor or a Parameter. A subclass may have other values than its
// memory.
bool is_exact(py::handle object) {
  PyTypeObject* const type = Py_TYPE(object.ptr());
  return type == reinterpret_cast<PyTypeObject*>(names().tensor) ||
         type == reinterpret_cast<PyTypeObject*>(names().parameter);
}

// Returns the address of torch's TensorImpl. Requires: is_tensor(object).
const void* implementation_of(py::handle object) {
  const py::object address = checked(PyObject_GetAttr(object.ptr(), names().cdata));
  const void* found = PyLong_AsVoidPtr(address.ptr());
  if (found == nullptr) throw py::value_error("the tensor is not initialized");
  return found;
}

// Returns the Python object of a tensor's storage.
py::object storage_of(py::handle object) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), names().untyped_storage));
}

void check_tensor(py::handle object) {
  if (!is_tensor(object)) {
    throw py::type_error("expected a torch.Tensor, got " +
                         std::string(py::str(py::type::handle_of(object))));
  }
}

// Facts of a strided tensor with a storage. Valid for the lifetime of the Python object.
class Strided {
 public:
  // Returns nullopt if the tensor has another layout, or no storage. Requires: is_tensor(object).
  static std::optional<Strided> of(py::handle object) {
    Strided out(object);
    const TorchLibrary& torch = TorchLibrary::get();
    const TensorHandle handle = out.handle();
    int32_t layout = 0;
    int64_t dim = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    if (torch.get_layout(handle, &layout) != 0 || layout != torch.strided ||
        torch.get_storage_size(handle, &out.storage_nbytes) != 0 ||
        torch.get_dim(handle, &dim) != 0 || torch.get_sizes(handle, &sizes) != 0 ||
        torch.get_strides(handle, &strides) != 0 ||
        torch.get_storage_offset(handle, &out.offset_) != 0 ||
        torch.get_dtype(handle, &out.dtype_) != 0 ||
        torch.get_device_type(handle, &out.device_) != 0) {
      return std::nullopt;
    }
    out.sizes = {sizes, static_cast<size_t>(dim)};
    out.strides = {strides, static_cast<size_t>(dim)};
    out.dtype = torch.dtype_of(out.dtype_);
    out.itemsize = static_cast<int64_t>(torch.element_size(out.dtype_));
    for (const int64_t size : out.sizes) out.numel *= size;
    return out;
  }

  bool is_cpu() const { return device_ == TorchLibrary::get().cpu; }
  bool is_cuda() const { return device_ == TorchLibrary::get().cuda; }
  bool is_meta() const { return device_ == TorchLibrary::get().meta; }

  // Returns whether the values differ from the memory, by torch's lazy conjugation or negation.
  bool is_lazy() const {
    const bool is_complex =
        dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
    return (is_complex && ask(TorchLibrary::get().is_conj, "is_conj")) ||
           ask(TorchLibrary::get().is_neg, "is_neg");
  }

  bool is_pinned() const {
    const auto function = TorchLibrary::get().is_pinned;
    if (function == nullptr) return object_.attr("is_pinned")().cast<bool>();
    return function(handle(), OptionalDevice());
  }

  // In bytes from the start of the storage. Requires for `end`: the tensor has elements.
  int64_t begin() const { return offset_ * itemsize; }
  int64_t end() const {
    int64_t last = offset_;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return (last + 1) * itemsize;
  }

  const std::byte* data() const {
    const void* found = nullptr;
    if (TorchLibrary::get().get_const_data(handle(), &found) != 0) throw_no_data();
    return static_cast<const std::byte*>(found);
  }

  std::byte* mutable_data() const {
    void* found = nullptr;
    if (TorchLibrary::get().get_mutable_data(handle(), &found) != 0) throw_no_data();
    return static_cast<std::byte*>(found);
  }

  int gpu() const {
    int32_t index = -1;
    if (TorchLibrary::get().get_device_index(handle(), &index) != 0) throw_no_data();
    return index;
  }

  py::handle object() const { return object_; }

  std::optional<DType> dtype;  // nullopt if the engine lacks it.
  int64_t itemsize = 0;
  int64_t numel = 1;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;  // In elements.
  int64_t storage_nbytes = 0;

 private:
  explicit Strided(py::handle object) : object_(object), impl_(implementation_of(object)) {}

  TensorHandle handle() const { return &impl_; }

  bool ask(bool (*function)(TensorHandle), const char* method) const {
    return function != nullptr ? function(handle()) : object_.attr(method)().cast<bool>();
  }

  [[noreturn]] static void throw_no_data() {
    throw py::value_error("torch does not give access to the memory of a tensor");
  }

  py::handle object_;
  const void* impl_;
  int64_t offset_ = 0;  // In elements.
  int32_t dtype_ = 0;
  int32_t device_ = 0;
};

// Returns the facts of a tensor that the engine can read, at least after a copy by torch.
std::optional<Strided> readable(py::handle object) {
  if (!is_exact(object)) return std::nullopt;
  std::optional<Strided> tensor = Strided::of(object);
  if (tensor && (!tensor->dtype || tensor->is_meta())) tensor.reset();
  return tensor;
}

TensorKind kind_of(const std::optional<Strided>& tensor) {
  if (!tensor) return TensorKind::kTorchOnly;
  return tensor->is_cpu() && !tensor->is_lazy() ? TensorKind::kPlain : TensorKind::kNeedsCopy;
}

bool is_expanded(const Strided& tensor) {
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.strides[d] == 0 && tensor.sizes[d] > 1) return true;
  }
  return false;
}

bool is_contiguous(const Strided& tensor) {
  int64_t expected = 1;
  for (size_t d = tensor.sizes.size(); d-- > 0;) {
    if (tensor.sizes[d] == 1) continue;
    if (tensor.strides[d] != expected) return false;
    expected *= tensor.sizes[d];
  }
  return true;
}

// Returns whether several elements may share memory. False if each stride exceeds the extent of all
// smaller strides. Other strides may still be without overlap.
bool may_overlap(const Strided& tensor) {
  if (tensor.numel < 2 || is_contiguous(tensor)) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // Stride and size.
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] > 1) dims.emplace_back(tensor.strides[d], tensor.sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;  // Position of the last element, in the dimensions so far.
  for (const auto& [stride, size] : dims) {
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

// Returns a view without memory. Requires: the engine has the dtype.
TensorView shape_of(const Strided& tensor) {
  TensorView out;
  out.dtype = *tensor.dtype;
  out.sizes.assign(tensor.sizes.begin(), tensor.sizes.end());
  out.strides.assign(tensor.strides.begin(), tensor.strides.end());
  for (int64_t& stride : out.strides) stride *= tensor.itemsize;
  return out;
}

TensorKind tensor_kind(py::handle object) {
  check_tensor(object);
  return kind_of(readable(object));
}

// Returns whether the engine itself copies from and to GPUs. If it does not, torch does.
bool engine_has_cuda() {
  // Guarded by the GIL. If two threads compute it at the same time, the results are equal.
  static std::optional<bool> known;
  if (!known) {
    known = py::module_::import("torch_ckpt._core._native").attr("why_no_cuda")().is_none();
  }
  return *known;
}

// Returns whether this torch was built to pin memory. Asking for each tensor would cost more than
// its plan. Asking the driver would initialize it, and forked children could not use it then.
bool can_pin() {
  static std::optional<bool> known;  // As above.
  if (!known) {
    known = !py::module_::import("torch.accelerator").attr("current_accelerator")().is_none();
  }
  return *known;
}

// Returns whether the engine can copy from and to the tensor's GPU memory. The memory of a lazily
// conjugated or negated tensor differs from its values, so torch copies such a tensor.
bool is_on_known_gpu(const Strided& tensor) {
  return tensor.is_cuda() && !tensor.is_lazy() && engine_has_cuda();
}

// Returns whether the engine can load into the tensor's memory. The tensor must be plain or on a
// GPU that the engine supports, and no two elements may share memory.
bool can_load(const std::optional<Strided>& tensor, TensorKind kind) {
  return (kind == TensorKind::kPlain ||
          (kind == TensorKind::kNeedsCopy && is_on_known_gpu(*tensor))) &&
         !may_overlap(*tensor);
}

bool is_loadable(py::handle object) {
  check_tensor(object);
  const std::optional<Strided> tensor = readable(object);
  return can_load(tensor, kind_of(tensor));
}

// Returns whether several elements of a tensor may share memory.
bool may_overlap_itself(py::handle object) {
  check_tensor(object);
  if (!is_exact(object)) return false;
  const std::optional<Strided> tensor = Strided::of(object);
  return tensor && may_overlap(*tensor);
}

std::string text_of(std::span<const int64_t> numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  }
  return out + "]";
}

// Returns why no value can be written to a tensor, and what to pass instead. Empty if none is
// known.
std::string write_fault(py::handle object) {
  if (!is_exact(object)) return "";  // A subclass may write to any memory.
  const std::optional<Strided> tensor = Strided::of(object);
  if (!tensor || tensor->numel == 0) return "";
  if (tensor->is_meta()) {
    return "it is on the meta device, without memory; pass a tensor on another device";
  }
  const int64_t nbytes = tensor->storage_nbytes;
  const bool has_memory = reinterpret_cast<int64_t>(tensor->data()) != tensor->begin();
  if (nbytes > 0 && !has_memory && object.attr("_is_zerotensor")().cast<bool>()) {
    return "it is an immutable ZeroTensor; pass a clone of it";
  }
  if (tensor->end() > nbytes) {
    return "its storage has " + std::to_string(nbytes) + " bytes of the " +
           std::to_string(tensor->end()) + " that it needs; allocate it before the load";
  }
  if (is_expanded(*tensor)) {
    return "its elements share memory (strides " + text_of(tensor->strides) +
           "); pass a clone of it";
  }
  // Torch allocates memory that can be resized. Other memory is an array's, or a mapped file's.
  if (tensor->is_cpu() && !storage_of(object).attr("resizable")().cast<bool>()) {
    const std::byte* const first = tensor->data();
    const std::byte* const last = first + (tensor->end() - tensor->begin() - 1);
    if (first != nullptr && (!is_writable(first) || !is_writable(last))) {
      return "its memory is mapped read-only; pass a copy of it";
    }
  }
  return "";
}

// Returns position and fault of each object that is a tensor to which no value can be written.
std::vector<std::pair<int64_t, std::string>> write_faults(const py::list& objects) {
  std::vector<std::pair<int64_t, std::string>> out;
  int64_t position = 0;
  for (const py::handle object : objects) {
    if (is_tensor(object)) {
      std::string fault = write_fault(object);
      if (!fault.empty()) out.emplace_back(position, std::move(fault));
    }
    ++position;
  }
  return out;
}

// torch's current stream of each GPU, queried once per GPU.
class CurrentStreams {
 public:
  uint64_t of(int gpu) {
    const auto [found, is_new] = streams_.try_emplace(gpu, 0);
    if (is_new) {
      found->second = py::module_::import("torch.cuda")
                          .attr("current_stream")(gpu)
                          .attr("cuda_stream")
                          .cast<uint64_t>();
    }
    return found->second;
  }

 private:
  std::map<int, uint64_t> streams_;
};

// Returns a number for a tensor's storage and the tensor's byte range [begin, end) in it. Returns
// zeros for a tensor without elements or without a storage.
py::tuple tensor_extent(py::handle object) {
  check_tensor(object);
  const std::optional<Strided> tensor = Strided::of(object);
  if (!tensor || tensor->numel == 0) return py::make_tuple(0, 0, 0);
  return py::make_tuple(storage_of(object).attr("_cdata"), tensor->begin(), tensor->end());
}

// Returns a view of a tensor whose memory the engine can access. Raises ValueError if the storage
// is smaller than sizes and strides require.
TensorView view_of(const Strided& tensor, std::string name, bool writable,
                   CurrentStreams& streams) {
  if (tensor.numel != 0 && tensor.end() > tensor.storage_nbytes) {
    throw py::value_error((name.empty() ? "the tensor" : "tensor '" + name + "'") +
                          " reaches beyond its storage of " +
                          std::to_string(tensor.storage_nbytes) + " bytes");
  }
  TensorView out = shape_of(tensor);
  out.name = std::move(name);
  // Torch copies a tensor that is copied on write when its mutable data is taken.
  out.data = writable ? tensor.mutable_data() : const_cast<std::byte*>(tensor.data());
  out.writable = writable;
  if (tensor.is_cuda()) {
    out.gpu = tensor.gpu();
    out.stream = streams.of(out.gpu);
  }
  out.storage = owned_by_any_thread(storage_of(tensor.object()));
  return out;
}

// The engine writes without autograd; a new version invalidates values saved for backward.
void increment_versions(const py::list& tensors) {
  py::module_::import("torch.autograd.graph").attr("increment_version")(tensors);
}

// Returns a view of a tensor for the engine. Raises ValueError unless the tensor is plain, or, if
// `writable`, loadable.
TensorView view(py::handle object, std::string name, bool writable) {
  check_tensor(object);
  const std::optional<Strided> tensor = readable(object);
  const TensorKind kind = kind_of(tensor);
  if (writable ? !can_load(tensor, kind) : kind != TensorKind::kPlain) {
    throw py::value_error("tensor '" + name + "' is not a plain strided tensor");
  }
  CurrentStreams streams;
  TensorView out = view_of(*tensor, std::move(name), writable, streams);
  if (writable) {
    py::list written;
    written.append(object);
    increment_versions(written);
  }
  return out;
}

// Returns a view and a kind for each object. An object that is no tensor has the kind kTorchOnly.
// If `writable`, every loadable tensor is kPlain with a writable view; other views are read-only.
// If `stages`, a tensor on a GPU that the engine can copy from is kPlain.
TensorBatch inspect(const py::list& objects, bool writable, bool stages) {
  CurrentStreams streams;
  TensorBatch out;
  out.views.reserve(objects.size());
  out.kinds.reserve(objects.size());
  py::list written;
  for (const py::handle object : objects) {
    const std::optional<Strided> tensor = readable(object);
    TensorKind kind = kind_of(tensor);
    const bool loads = writable && can_load(tensor, kind);
    const bool is_staged = stages && kind == TensorKind::kNeedsCopy && is_on_known_gpu(*tensor);
    if (loads || is_staged) kind = TensorKind::kPlain;
    if (loads) written.append(object);
    out.kinds.push_back(kind);
    if (kind == TensorKind::kPlain) {
      out.views.push_back(view_of(*tensor, "", loads, streams));
    } else if (kind == TensorKind::kNeedsCopy) {
      out.views.push_back(shape_of(*tensor));
    } else {
      out.views.emplace_back();
    }
  }
  if (!written.empty()) increment_versions(written);
  return out;
}

}  // namespace

bool is_tensor(py::handle object) {
  return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(names().tensor)) !=
         0;
}

bool is_plannable(py::handle object) { return readable(object).has_value(); }

std::optional<TensorItem> describe(py::handle object) {
  const std::optional<Strided> tensor = readable(object);
  if (!tensor) return std::nullopt;
  const DTypeInfo& dtype = dtype_info(*tensor->dtype);
  TensorItem item;
  item.dtype = dtype.name;
  item.itemsize = dtype.itemsize;
  item.requires_grad = requires_grad(object);
  // Torch would copy a lazily conjugated or negated tensor, and crash if its storage is freed.
  item.pin_memory = can_pin() && tensor->is_cpu() && !tensor->is_lazy() && tensor->is_pinned();
  item.sizes = tensor->sizes;
  return item;
}

std::span<const int64_t> sizes_of(py::handle object) {
  const std::optional<Strided> tensor = Strided::of(object);
  if (!tensor) throw py::value_error("the tensor is not strided");
  return tensor->sizes;
}

bool requires_grad(py::handle object) {
  return checked(PyObject_GetAttr(object.ptr(), names().requires_grad)).ptr() == Py_True;
}

bool is_grad_enabled() {
  return checked(PyObject_CallNoArgs(names().is_grad_enabled)).ptr() == Py_True;
}

}  // namespace torch_ckpt

PYBIND11_MODULE(_tensor_view, module) {
  using namespace torch_ckpt;
  module.doc() = "Access of torch_ckpt's native engine to torch.Tensor.";
  py::module_::import("torch_ckpt._core._native");  // Registers TensorView.
  TorchLibrary::get();
  py::enum_<TensorKind>(module, "TensorKind")
      .value("PLAIN", TensorKind::kPlain)
      .value("NEEDS_COPY", TensorKind::kNeedsCopy)
      .value("TORCH_ONLY", TensorKind::kTorchOnly);
  module.def("tensor_kind", &tensor_kind, py::arg("tensor"));
  module.def("is_plannable", &is_plannable, py::arg("object"));
  module.def("is_loadable", &is_loadable, py::arg("tensor"));
  module.def("may_overlap_itself", &may_overlap_itself, py::arg("tensor"));
  module.def("write_faults", &write_faults, py::arg("objects"));
  module.def("extent", &tensor_extent, py::arg("tensor"));
  module.def("inspect", &inspect, py::arg("objects"), py::arg("writable"),
             py::arg("stages") = false);
  module.def("flatten", &flatten, py::arg("state_dict"));
  py::class_<ShardBox>(module, "ShardBox")
      .def(py::init<Dims, Dims, Dims, int32_t>(), py::arg("sizes"), py::arg("offsets"),
           py::arg("box_sizes"), py::arg("replica") = -1);
  bind_peers(module);
  py::class_<ShardBoxes>(module, "ShardBoxes")
      .def(py::init<py::type, py::type, py::type, py::function>(), py::arg("dtensor"),
           py::arg("shard"), py::arg("replicate"), py::arg("box_of"));
  module.def("list_tensors", &list_tensors, py::arg("flat"), py::arg("sink"), py::arg("boxes"),
             py::arg("other"));
  module.def("view", &view, py::arg("tensor"), py::arg("name"), py::arg("writable"));
}
