#pragma once

// Rounding of float32 numbers to the nearest even number of 16 bits, as torch rounds. For the CPU,
// and for kernels, which include no C++ header that calls functions of the host.

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TORCH_CKPT_ANYWHERE __host__ __device__ inline
#else
#define TORCH_CKPT_ANYWHERE inline
#endif

namespace torch_ckpt {

TORCH_CKPT_ANYWHERE uint32_t bits_of_float(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TORCH_CKPT_ANYWHERE float float_of_bits(uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

TORCH_CKPT_ANYWHERE uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN.
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

TORCH_CKPT_ANYWHERE uint16_t to_float16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half = 0;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // At least 65520, which rounds to infinity.
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // Subnormal: float32 has the step 2 ** -24 at 0.5.
    half = bits_of_float(float_of_bits(magnitude) + 0.5F) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace torch_ckpt
