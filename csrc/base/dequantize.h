#pragma once

// Dequantisation of rows: numbers of 8 or 4 bits, multiplied by the scales of their blocks, become
// floats. A product is computed in float32 and rounded once, to the nearest even number, as torch
// does. engine/dequantization.h applies it to tensors.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace torch_ckpt {

// Whether numbers of this dtype, of 8 bits, can be dequantised: float8 with a sign, and int8.
bool is_code(DType dtype);

// Whether dequantised numbers can have this dtype: float32, bfloat16 or float16.
bool is_dequantized(DType dtype);

// Whether scales can have this dtype. A uint8 is a power of two, as float8_e8m0fnu is, but 255 is
// infinite.
bool is_scale(DType dtype);

// The value of each code of a dtype, for which is_code, or of packed float4_e2m1.
std::span<const float> code_values(DType dtype);

// Converts `count` scales to float32. Requires: is_scale(dtype).
void read_scales(DType dtype, const std::byte* from, int64_t count, float* to);

// A part of a row of a tensor.
struct CodeRow {
  const std::byte* codes = nullptr;
  int64_t count = 0;
  int64_t first = 0;              // Position of the first number in its block.
  int64_t block = 1;              // Numbers that share a scale.
  const float* scales = nullptr;  // Those of the row's blocks.
};

// Writes the products of a row to `out`. Requires: is_code(from); is_dequantized(to).
void dequantize_row(const CodeRow& row, DType from, DType to, std::byte* out);

// Converts the numbers [begin, begin + count) of packed float4_e2m1, two to a byte with the first
// one in the low half, to codes of float8_e5m2. Each has the same value.
void expand_e2m1(const std::byte* packed, int64_t begin, int64_t count, std::byte* codes);

}  // namespace torch_ckpt
