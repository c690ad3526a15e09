#include "bindings/torch_library.h"

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <string>

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Returns the library that `import torch` has loaded.
void* loaded_library() {
  void* library = ::dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  return library != nullptr ? library : RTLD_DEFAULT;  // Some packages name it otherwise.
}

class Symbols {
 public:
  template <typename Function>
  void find_or_null(const char* name, Function** function) const {
    *function = reinterpret_cast<Function*>(::dlsym(library_, name));
  }

  template <typename Function>
  void find(const char* name, Function** function) const {
    find_or_null(name, function);
    if (*function == nullptr) throw py::import_error("libtorch_cpu.so has no " + std::string(name));
  }

  int32_t number(const char* name) const {
    int32_t (*function)() = nullptr;
    find(name, &function);
    return function();
  }

 private:
  void* const library_ = loaded_library();  // Never closed: torch stays loaded.
};

}  // namespace

TorchLibrary::TorchLibrary() {
  const Symbols torch;
  torch.find("aoti_torch_get_dim", &get_dim);
  torch.find("aoti_torch_get_sizes", &get_sizes);
  torch.find("aoti_torch_get_strides", &get_strides);
  torch.find("aoti_torch_get_layout", &get_layout);
  torch.find("aoti_torch_get_dtype", &get_dtype);
  torch.find("aoti_torch_get_device_type", &get_device_type);
  torch.find("aoti_torch_get_device_index", &get_device_index);
  torch.find("aoti_torch_get_storage_offset", &get_storage_offset);
  torch.find("aoti_torch_get_storage_size", &get_storage_size);
  torch.find("torch_get_const_data_ptr", &get_const_data);
  torch.find("torch_get_mutable_data_ptr", &get_mutable_data);
  torch.find("aoti_torch_dtype_element_size", &element_size);
  torch.find_or_null("_ZN2at4_ops7is_conj4callERKNS_6TensorE", &is_conj);
  torch.find_or_null("_ZN2at4_ops6is_neg4callERKNS_6TensorE", &is_neg);
  torch.find_or_null("_ZN2at4_ops9is_pinned4callERKNS_6TensorESt8optionalIN3c106DeviceEE",
                     &is_pinned);
  strided = torch.number("aoti_torch_layout_strided");
  cpu = torch.number("aoti_torch_device_type_cpu");
  cuda = torch.number("aoti_torch_device_type_cuda");
  meta = torch.number("aoti_torch_device_type_meta");
  dtypes_.fill(-1);
  for (int i = 0; i < kDTypeCount; ++i) {
    const std::string name(dtype_info(static_cast<DType>(i)).name);
    int32_t (*function)() = nullptr;
    torch.find_or_null(("aoti_torch_dtype_" + name).c_str(), &function);
    if (function == nullptr) torch.find(("torch_dtype_" + name).c_str(), &function);
    dtypes_.at(static_cast<size_t>(function())) = static_cast<int8_t>(i);
  }
}

const TorchLibrary& TorchLibrary::get() {
  static const TorchLibrary torch;
  return torch;
}

std::optional<DType> TorchLibrary::dtype_of(int32_t number) const {
  const auto at = static_cast<size_t>(number);
  if (at >= dtypes_.size() || dtypes_[at] < 0) return std::nullopt;
  return static_cast<DType>(dtypes_[at]);
}

}  // namespace torch_ckpt
