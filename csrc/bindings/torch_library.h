#pragma once

// TorchLibrary: the functions of libtorch that read a tensor's facts. They are found in the process
// at import, so that one build serves every version of torch that exports them.

#include <array>
#include <cstdint>
#include <optional>

#include "base/dtype.h"

namespace torch_ckpt {

// Points to an at::Tensor, which is one pointer itself. torch calls it AtenTensorHandle.
using TensorHandle = const void* const*;

// A std::optional<c10::Device>, as it is passed.
struct OptionalDevice {
  int8_t type = 0;
  int8_t index = 0;
  bool has_value = false;
};

// Functions that return int32_t are torch's C interface for extensions (torch/csrc/stable,
// aoti_torch): they return 0, or print an error and return another number.
class TorchLibrary {
 public:
  // Returns the functions. Raises ImportError if libtorch is not loaded, or lacks one of them.
  // Requires: the caller owns the GIL.
  static const TorchLibrary& get();

  int32_t (*get_dim)(TensorHandle, int64_t*) = nullptr;
  int32_t (*get_sizes)(TensorHandle, int64_t**) = nullptr;
  int32_t (*get_strides)(TensorHandle, int64_t**) = nullptr;
  int32_t (*get_layout)(TensorHandle, int32_t*) = nullptr;
  int32_t (*get_dtype)(TensorHandle, int32_t*) = nullptr;
  int32_t (*get_device_type)(TensorHandle, int32_t*) = nullptr;
  int32_t (*get_device_index)(TensorHandle, int32_t*) = nullptr;
  int32_t (*get_storage_offset)(TensorHandle, int64_t*) = nullptr;  // In elements.
  int32_t (*get_storage_size)(TensorHandle, int64_t*) = nullptr;    // In bytes.
  int32_t (*get_const_data)(TensorHandle, const void**) = nullptr;
  int32_t (*get_mutable_data)(TensorHandle, void**) = nullptr;
  size_t (*element_size)(int32_t dtype) = nullptr;

  // C++ functions, which the C interface lacks. Python's methods do the same, but release the GIL:
  // a busy thread would get it before every tensor. They may be missing.
  bool (*is_conj)(TensorHandle) = nullptr;
  bool (*is_neg)(TensorHandle) = nullptr;
  bool (*is_pinned)(TensorHandle, OptionalDevice) = nullptr;

  int32_t strided = 0;  // Layout.
  int32_t cpu = 0;      // Device types.
  int32_t cuda = 0;
  int32_t meta = 0;

  // Returns the engine's dtype for torch's number of a dtype.
  std::optional<DType> dtype_of(int32_t number) const;

 private:
  TorchLibrary();

  std::array<int8_t, 128> dtypes_ = {};  // By torch's number; -1 for dtypes that the engine lacks.
};

}  // namespace torch_ckpt
