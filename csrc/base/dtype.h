#pragma once

// Element types of tensors, with their PyTorch names.

#include <cstdint>
#include <optional>
#include <string_view>

namespace torch_ckpt {

enum class DType : uint8_t {
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
  kBool,
  kFloat8E4M3FN,
  kFloat8E4M3FNUZ,
  kFloat8E5M2,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
  kFloat4E2M1FNX2,  // An element is one byte, which contains two numbers.
};

inline constexpr int kDTypeCount = 22;

struct DTypeInfo {
  DType dtype;
  std::string_view name;     // Attribute of `torch`: "bfloat16".
  std::string_view storage;  // Typed storage class of `torch`, or "" if torch has none.
  int itemsize;              // Bytes per element.
};

inline constexpr int64_t kMaxItemsize = 16;  // Bytes per element of the largest dtype.

const DTypeInfo& dtype_info(DType dtype);

inline int64_t itemsize(DType dtype) { return dtype_info(dtype).itemsize; }

// Finds a dtype by its `name` or `storage`; nullopt if this engine does not store that dtype.
std::optional<DType> dtype_from_name(std::string_view name);
std::optional<DType> dtype_from_storage(std::string_view storage);

}  // namespace torch_ckpt
