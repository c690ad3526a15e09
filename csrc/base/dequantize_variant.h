#pragma once

// The parts of dequantisation for which AVX2 has instructions. dequantize.cc has the reference for
// all other CPUs and numbers. Like xxh3_variant.h, this header includes no C++ header.

#include <stdint.h>

namespace torch_ckpt {

enum class FloatCode : uint8_t { kE4M3FN, kE5M2 };
enum class FloatOut : uint8_t { kFloat32, kBFloat16, kFloat16 };

struct DequantizeVariant {
  // Writes `count` products with one scale to `out`.
  void (*multiply)(const uint8_t* codes, int64_t count, float scale, FloatCode from, FloatOut to,
                   void* out);
  // Expands `nbytes` packed bytes to twice as many codes; see expand_e2m1.
  void (*expand)(const uint8_t* packed, int64_t nbytes, uint8_t* codes);
};

struct CodeRow;              // dequantize.h
enum class DType : uint8_t;  // dtype.h

// dequantize_row by a variant, or by the reference if it is null.
void dequantize_row_by(const DequantizeVariant* variant, const CodeRow& row, DType from, DType to,
                       void* out);

// Returns null if the compiler or the CPU does not support AVX2 and F16C.
const DequantizeVariant* dequantize_avx2();

}  // namespace torch_ckpt
