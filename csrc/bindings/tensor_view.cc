// The extension module torch_ckpt._core._tensor_view: the only native code that uses libtorch. The
// other module, torch_ckpt._core._native, also works in programs without torch.

#include "bindings/tensor_view.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/writable_memory.h"
#include "bindings/peers.h"
#include "bindings/state_dict.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

const at::Tensor& unpack(py::handle tensor) {
  if (!THPVariable_Check(tensor.ptr())) {
    throw py::type_error("expected a torch.Tensor, got " +
                         std::string(py::str(py::type::handle_of(tensor))));
  }
  return THPVariable_Unpack(tensor.ptr());
}

std::optional<DType> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::ScalarType::Byte:
      return DType::kUInt8;
    case at::ScalarType::Char:
      return DType::kInt8;
    case at::ScalarType::Short:
      return DType::kInt16;
    case at::ScalarType::Int:
      return DType::kInt32;
    case at::ScalarType::Long:
      return DType::kInt64;
    case at::ScalarType::UInt16:
      return DType::kUInt16;
    case at::ScalarType::UInt32:
      return DType::kUInt32;
    case at::ScalarType::UInt64:
      return DType::kUInt64;
    case at::ScalarType::Half:
      return DType::kFloat16;
    case at::ScalarType::BFloat16:
      return DType::kBFloat16;
    case at::ScalarType::Float:
      return DType::kFloat32;
    case at::ScalarType::Double:
      return DType::kFloat64;
    case at::ScalarType::ComplexHalf:
      return DType::kComplex32;
    case at::ScalarType::ComplexFloat:
      return DType::kComplex64;
    case at::ScalarType::ComplexDouble:
      return DType::kComplex128;
    case at::ScalarType::Bool:
      return DType::kBool;
    case at::ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case at::ScalarType::Float8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case at::ScalarType::Float8_e5m2:
      return DType::kFloat8E5M2;
    case at::ScalarType::Float8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case at::ScalarType::Float8_e8m0fnu:
      return DType::kFloat8E8M0FNU;
    case at::ScalarType::Float4_e2m1fn_x2:
      return DType::kFloat4E2M1FNX2;
    default:
      return std::nullopt;
  }
}

TensorKind kind_of(py::handle object, const at::Tensor& tensor) {
  const bool subclass = !THPVariable_CheckExact(object.ptr());
  if (subclass || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta() ||
      !tensor.has_storage() || !dtype_of(tensor)) {
    return TensorKind::kTorchOnly;
  }
  if (!tensor.is_cpu() || tensor.is_conj() || tensor.is_neg()) return TensorKind::kNeedsCopy;
  return TensorKind::kPlain;
}

// Returns the end of the last element, in bytes from the start of the storage.
// Requires: the tensor has elements.
int64_t storage_end(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * static_cast<int64_t>(tensor.itemsize());
}

bool is_expanded(const at::Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) return true;
  }
  return false;
}

// Returns whether several elements may share memory. False if each stride exceeds the extent of all
// smaller strides. Other strides may still be without overlap.
bool may_overlap(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense() || tensor.numel() < 2) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // Stride and size.
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;  // Position of the last element, in the dimensions so far.
  for (const auto& [stride, size] : dims) {
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

// Returns a view without memory. Requires: the tensor is strided, and the engine has its dtype.
TensorView shape_of(const at::Tensor& tensor) {
  TensorView out;
  out.dtype = *dtype_of(tensor);
  out.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  out.strides.assign(tensor.strides().begin(), tensor.strides().end());
  for (int64_t& stride : out.strides) stride *= static_cast<int64_t>(tensor.itemsize());
  return out;
}

TensorKind tensor_kind(py::handle tensor) { return kind_of(tensor, unpack(tensor)); }

// Returns whether the engine itself copies from and to GPUs. If it does not, torch does.
bool engine_has_cuda() {
  // Guarded by the GIL. If two threads compute it at the same time, the results are equal.
  static std::optional<bool> known;
  if (!known) {
    known = py::module_::import("torch_ckpt._core._native").attr("why_no_cuda")().is_none();
  }
  return *known;
}

// Returns whether the engine can copy from and to the tensor's GPU memory. The memory of a lazily
// conjugated or negated tensor differs from its values, so torch copies such a tensor.
bool is_on_known_gpu(const at::Tensor& tensor) {
  return tensor.is_cuda() && !tensor.is_conj() && !tensor.is_neg() && engine_has_cuda();
}

// Returns whether the engine can load into the tensor's memory. The tensor must be plain or on a
// GPU that the engine supports, and no two elements may share memory.
bool is_loadable(py::handle object) {
  const at::Tensor& tensor = unpack(object);
  const TensorKind kind = kind_of(object, tensor);
  return (kind == TensorKind::kPlain ||
          (kind == TensorKind::kNeedsCopy && is_on_known_gpu(tensor))) &&
         !may_overlap(tensor);
}

// Returns whether several elements of a tensor may share memory.
bool may_overlap_itself(py::handle object) {
  const at::Tensor& tensor = unpack(object);
  return THPVariable_CheckExact(object.ptr()) && tensor.layout() == at::kStrided &&
         may_overlap(tensor);
}

std::string text_of(at::IntArrayRef numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  }
  return out + "]";
}

// Returns why no value can be written to a tensor, and what to pass instead. Empty if none is
// known.
std::string write_fault(py::handle object) {
  if (!THPVariable_CheckExact(object.ptr())) return "";  // A subclass may write to any memory.
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (tensor.numel() == 0) return "";
  if (tensor.is_meta()) {
    return "it is on the meta device, without memory; pass a tensor on another device";
  }
  if (tensor._is_zerotensor()) return "it is an immutable ZeroTensor; pass a clone of it";
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) return "";
  const auto nbytes = static_cast<int64_t>(tensor.storage().nbytes());
  if (storage_end(tensor) > nbytes) {
    return "its storage has " + std::to_string(nbytes) + " bytes of the " +
           std::to_string(storage_end(tensor)) + " that it needs; allocate it before the load";
  }
  if (is_expanded(tensor)) {
    return "its elements share memory (strides " + text_of(tensor.strides()) +
           "); pass a clone of it";
  }
  // Torch allocates memory that can be resized. Other memory is an array's, or a mapped file's.
  if (tensor.is_cpu() && !tensor.storage().unsafeGetStorageImpl()->resizable()) {
    const auto* storage = static_cast<const std::byte*>(tensor.storage().data());
    const int64_t begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    if (storage != nullptr &&
        (!is_writable(storage + begin) || !is_writable(storage + storage_end(tensor) - 1))) {
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
    if (THPVariable_Check(object.ptr())) {
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
    // Query torch through Python: this module may be built against a torch without CUDA.
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

// Returns the address of a tensor's storage and the tensor's byte range [begin, end) in it. Returns
// zeros for a tensor without elements or without a storage.
py::tuple tensor_extent(py::handle object) {
  const at::Tensor& tensor = unpack(object);
  if (!tensor.has_storage() || tensor.numel() == 0) return py::make_tuple(0, 0, 0);
  const int64_t begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  const void* storage = tensor.storage().unsafeGetStorageImpl();
  return py::make_tuple(reinterpret_cast<uintptr_t>(storage), begin, storage_end(tensor));
}

// Returns whether no other tensor shares the tensor's storage.
bool has_own_storage(py::handle tensor) {
  const at::Tensor& unpacked = unpack(tensor);
  int64_t owners = static_cast<int64_t>(unpacked.storage().use_count());
  // The Python object of a storage owns it, and may have no other reference than the storage's own.
  PyObject* object = unpacked.storage().unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  if (object != nullptr && Py_REFCNT(object) == 1) --owners;
  return owners == 1;
}

// Returns a view of a tensor whose memory the engine can access. Raises ValueError if the storage
// is smaller than sizes and strides require.
TensorView view_of(const at::Tensor& tensor, std::string name, bool writable,
                   CurrentStreams& streams) {
  const int64_t extent = tensor.numel() == 0 ? 0 : storage_end(tensor);
  if (extent > static_cast<int64_t>(tensor.storage().nbytes())) {
    throw py::value_error((name.empty() ? "the tensor" : "tensor '" + name + "'") +
                          " reaches beyond its storage of " +
                          std::to_string(tensor.storage().nbytes()) + " bytes");
  }
  // The engine writes without autograd; the new version invalidates values saved for backward.
  if (writable && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  TensorView out = shape_of(tensor);
  out.name = std::move(name);
  // const_data_ptr avoids copy-on-write materialisation by a read.
  out.data = static_cast<std::byte*>(writable ? tensor.mutable_data_ptr()
                                              : const_cast<void*>(tensor.const_data_ptr()));
  out.writable = writable;
  if (tensor.is_cuda()) {
    out.gpu = tensor.get_device();
    out.stream = streams.of(out.gpu);
  }
  out.storage = std::make_shared<c10::Storage>(tensor.storage());
  return out;
}

// Returns a view of a tensor for the engine. Raises ValueError unless the tensor is plain, or, if
// `writable`, loadable.
TensorView view(py::handle object, std::string name, bool writable) {
  const at::Tensor& tensor = unpack(object);
  if (writable ? !is_loadable(object) : kind_of(object, tensor) != TensorKind::kPlain) {
    throw py::value_error("tensor '" + name + "' is not a plain strided tensor");
  }
  CurrentStreams streams;
  return view_of(tensor, std::move(name), writable, streams);
}

// Returns a view and a kind for each object. An object that is no tensor has the kind kTorchOnly.
// If `writable`, every loadable tensor is kPlain with a writable view; other views are read-only.
// If `stages`, a tensor on a GPU that the engine can copy from is kPlain.
TensorBatch inspect(const py::list& objects, bool writable, bool stages) {
  CurrentStreams streams;
  TensorBatch out;
  out.views.reserve(objects.size());
  out.kinds.reserve(objects.size());
  for (const py::handle object : objects) {
    if (!THPVariable_Check(object.ptr())) {
      out.kinds.push_back(TensorKind::kTorchOnly);
      out.views.emplace_back();
      continue;
    }
    const at::Tensor& tensor = unpack(object);
    const bool loads = writable && is_loadable(object);
    TensorKind kind = kind_of(object, tensor);
    const bool is_staged = stages && kind == TensorKind::kNeedsCopy && is_on_known_gpu(tensor);
    if (loads || is_staged) kind = TensorKind::kPlain;
    out.kinds.push_back(kind);
    if (kind == TensorKind::kPlain) {
      out.views.push_back(view_of(tensor, "", loads, streams));
    } else if (kind == TensorKind::kNeedsCopy) {
      out.views.push_back(shape_of(tensor));
    } else {
      out.views.emplace_back();
    }
  }
  return out;
}

}  // namespace

bool is_tensor(py::handle object) { return THPVariable_Check(object.ptr()); }

bool is_plannable(py::handle object) {
  return THPVariable_CheckExact(object.ptr()) &&
         kind_of(object, THPVariable_Unpack(object.ptr())) != TensorKind::kTorchOnly;
}

TensorItem describe(py::handle object) {
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  const DTypeInfo& dtype = dtype_info(*dtype_of(tensor));
  // Torch would copy a lazily conjugated or negated tensor here, and crash if its storage is freed.
  const bool is_lazy = tensor.is_conj() || tensor.is_neg();
  return {.dtype = dtype.name,
          .itemsize = dtype.itemsize,
          .pin_memory = !is_lazy && tensor.is_pinned()};
}

std::span<const int64_t> sizes_of(py::handle object) {
  const at::IntArrayRef sizes = THPVariable_Unpack(object.ptr()).sizes();
  return {sizes.data(), sizes.size()};
}

bool requires_grad(py::handle object) { return THPVariable_Unpack(object.ptr()).requires_grad(); }

bool is_grad_enabled() { return at::GradMode::is_enabled(); }

}  // namespace torch_ckpt

PYBIND11_MODULE(_tensor_view, module) {
  using namespace torch_ckpt;
  module.doc() = "Access of torch_ckpt's native engine to torch.Tensor.";
  py::module_::import("torch_ckpt._core._native");  // Registers TensorView.
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
  module.def("has_own_storage", &has_own_storage, py::arg("tensor"));
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
