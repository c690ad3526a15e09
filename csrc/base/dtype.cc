#include "base/dtype.h"

#include <array>
#include <cstddef>

namespace torch_ckpt {
namespace {

// Ordered by enum value.
constexpr std::array<DTypeInfo, kDTypeCount> kDTypes = {{
    {DType::kUInt8, "uint8", "ByteStorage", 1},
    {DType::kInt8, "int8", "CharStorage", 1},
    {DType::kInt16, "int16", "ShortStorage", 2},
    {DType::kInt32, "int32", "IntStorage", 4},
    {DType::kInt64, "int64", "LongStorage", 8},
    {DType::kUInt16, "uint16", "", 2},
    {DType::kUInt32, "uint32", "", 4},
    {DType::kUInt64, "uint64", "", 8},
    {DType::kFloat16, "float16", "HalfStorage", 2},
    {DType::kBFloat16, "bfloat16", "BFloat16Storage", 2},
    {DType::kFloat32, "float32", "FloatStorage", 4},
    {DType::kFloat64, "float64", "DoubleStorage", 8},
    {DType::kComplex32, "complex32", "", 4},
    {DType::kComplex64, "complex64", "ComplexFloatStorage", 8},
    {DType::kComplex128, "complex128", "ComplexDoubleStorage", 16},
    {DType::kBool, "bool", "BoolStorage", 1},
    {DType::kFloat8E4M3FN, "float8_e4m3fn", "", 1},
    {DType::kFloat8E4M3FNUZ, "float8_e4m3fnuz", "", 1},
    {DType::kFloat8E5M2, "float8_e5m2", "", 1},
    {DType::kFloat8E5M2FNUZ, "float8_e5m2fnuz", "", 1},
    {DType::kFloat8E8M0FNU, "float8_e8m0fnu", "", 1},
    {DType::kFloat4E2M1FNX2, "float4_e2m1fn_x2", "", 1},
}};

static_assert([] {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (kDTypes[i].dtype != static_cast<DType>(i)) return false;
  }
  return true;
}());

}  // namespace

const DTypeInfo& dtype_info(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return info.dtype;
  }
  return std::nullopt;
}

std::optional<DType> dtype_from_storage(std::string_view storage) {
  if (storage.empty()) return std::nullopt;
  for (const DTypeInfo& info : kDTypes) {
    if (info.storage == storage) return info.dtype;
  }
  return std::nullopt;
}

}  // namespace torch_ckpt
