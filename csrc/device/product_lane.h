#pragma once

// Products of quantised numbers and the scales of their blocks, as a kernel computes them: the
// table, and the work on one number. `engine/dequantization.cc` makes the table, `product.cu`
// executes it on a GPU, and tests execute it on the CPU.

#include <cstdint>

#include "base/round_float.h"
#include "device/lane.h"
#include "device/pack_lane.h"

namespace torch_ckpt {

inline constexpr int kMaxProductDims = 6;

enum class ProductType : uint8_t { kFloat32, kBFloat16, kFloat16 };

struct ProductDim {
  Divisor size;         // In numbers.
  Divisor block;        // Numbers that share a scale.
  uint32_t first = 0;   // Position of the first number in its block.
  uint32_t scale = 0;   // Stride of the scales, in scales.
  int64_t code = 0;     // Stride of the codes, in codes.
  int64_t product = 0;  // Stride of the tensor, in bytes.
};

// A box of numbers. Its codes have 8 bits, or 4 bits, with the first one in the low half of a byte.
struct ProductTable {
  int32_t ndim = 0;
  ProductDim dims[kMaxProductDims];  // Innermost first.
  uint32_t count = 0;                // Numbers in the box.
  uint32_t first_code = 0;           // 1 if the first number is in the high half of a byte.
  bool is_packed = false;
  ProductType to = ProductType::kFloat32;
  // Addresses. `values` has a float32 for each code, `scales` one for each block of the box.
  uint64_t codes = 0;
  uint64_t values = 0;
  uint64_t scales = 0;
  uint64_t products = 0;
};

// A product is not to be fused with an addition.
TORCH_CKPT_LANE float multiplied(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Computes and stores product `i`, in the order of the dimensions.
TORCH_CKPT_LANE void multiply_number(const ProductTable& table, uint32_t i) {
  uint64_t code_at = table.first_code;
  uint64_t scale_at = 0;
  uint64_t product_at = table.products;
  uint32_t rest = i;
  for (int32_t d = 0; d < table.ndim; ++d) {
    const ProductDim& dim = table.dims[d];
    // The outermost dimension gets the whole remainder.
    const uint32_t outer = d + 1 < table.ndim ? quotient(rest, dim.size) : 0;
    const uint32_t index = rest - outer * dim.size.value;
    code_at += static_cast<uint64_t>(index * dim.code);
    scale_at += uint64_t{quotient(dim.first + index, dim.block)} * dim.scale;
    product_at += static_cast<uint64_t>(index * dim.product);
    rest = outer;
  }
  uint32_t code = load_unit<uint8_t>(table.codes + (table.is_packed ? code_at / 2 : code_at));
  if (table.is_packed) code = code_at % 2 == 0 ? code & 0xf : code >> 4;
  const float value = load_unit<float>(table.values + uint64_t{code} * sizeof(float));
  const float scale = load_unit<float>(table.scales + scale_at * sizeof(float));
  const float product = multiplied(value, scale);
  switch (table.to) {
    case ProductType::kBFloat16:
      return store_unit(product_at, to_bfloat16(product));
    case ProductType::kFloat16:
      return store_unit(product_at, to_float16(product));
    default:
      return store_unit(product_at, product);
  }
}

}  // namespace torch_ckpt
