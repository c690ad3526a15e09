// The extension module torch_ckpt._core._tensor_view: the only native code that uses libtorch. The
// other module, torch_ckpt._core._native, also works in programs without torch.

#include "bindings/tensor_view.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <map>
#include <optional>

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
    default:
      return std::nullopt;
  }
}

TensorKind kind_of(py::handle object, const at::Tensor& tensor) {
  const bool subclass = !THPVariable_CheckExact(object.ptr());
  if (subclass || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta() ||
      !tensor.has_storage() || !dtype_of(tensor)) {
    return TensorKind::kTorchsOwn;
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
// GPU that the engine supports, and no two elements may share memory by a stride of 0.
bool is_loadable(py::handle object) {
  const at::Tensor& tensor = unpack(object);
  const TensorKind kind = kind_of(object, tensor);
  return (kind == TensorKind::kPlain ||
          (kind == TensorKind::kNeedsCopy && is_on_known_gpu(tensor))) &&
         !is_expanded(tensor);
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
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  // The Python object of a storage owns it, and may have no other reference than the storage's own.
  // Earlier versions do not count that object.
  PyObject* object = unpacked.storage().unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  if (object != nullptr && Py_REFCNT(object) == 1) --owners;
#endif
  return owners == 1;
}

// Returns a view of a tensor whose memory the engine can access. Raises ValueError if the storage
// is smaller than sizes and strides require.
TensorView view_of(const at::Tensor& tensor, std::string name, bool writable,
                   CurrentStreams& streams) {
  const int64_t extent = tensor.numel() == 0 ? 0 : storage_end(tensor);
  if (extent > static_cast<int64_t>(tensor.storage().nbytes())) {
    throw py::value_error("tensor '" + name + "' reaches beyond its storage of " +
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

// Returns a view and a kind for each object. An object that is no tensor has the kind kTorchsOwn.
// If `writable`, every loadable tensor is kPlain with a writable view; other views are read-only.
// If `stages`, a tensor on a GPU that the engine can copy from is kPlain.
TensorBatch inspect(const py::list& objects, bool writable, bool stages) {
  CurrentStreams streams;
  TensorBatch out;
  out.views.reserve(objects.size());
  out.kinds.reserve(objects.size());
  for (const py::handle object : objects) {
    if (!THPVariable_Check(object.ptr())) {
      out.kinds.push_back(TensorKind::kTorchsOwn);
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
         kind_of(object, THPVariable_Unpack(object.ptr())) != TensorKind::kTorchsOwn;
}

TensorItem describe(py::handle object) {
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  const DTypeInfo& dtype = dtype_info(*dtype_of(tensor));
  return {.dtype = dtype.name, .itemsize = dtype.itemsize, .pin_memory = tensor.is_pinned()};
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
      .value("TORCHS_OWN", TensorKind::kTorchsOwn);
  module.def("tensor_kind", &tensor_kind, py::arg("tensor"));
  module.def("is_plannable", &is_plannable, py::arg("object"));
  module.def("is_loadable", &is_loadable, py::arg("tensor"));
  module.def("extent", &tensor_extent, py::arg("tensor"));
  module.def("has_own_storage", &has_own_storage, py::arg("tensor"));
  module.def("inspect", &inspect, py::arg("objects"), py::arg("writable"),
             py::arg("stages") = false);
  module.def("flatten", &flatten, py::arg("state_dict"));
  py::class_<ShardBox>(module, "ShardBox")
      .def(py::init<Dims, Dims, Dims>(), py::arg("sizes"), py::arg("offsets"),
           py::arg("box_sizes"));
  bind_peers(module);
  py::class_<ShardBoxes>(module, "ShardBoxes")
      .def(py::init<py::type, py::type, py::type, py::function>(), py::arg("dtensor"),
           py::arg("shard"), py::arg("replicate"), py::arg("box_of"));
  module.def("list_tensors", &list_tensors, py::arg("flat"), py::arg("sink"), py::arg("boxes"),
             py::arg("other"));
  module.def("view", &view, py::arg("tensor"), py::arg("name"), py::arg("writable"));
}
