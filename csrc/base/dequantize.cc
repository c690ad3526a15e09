#include "base/dequantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/dequantize_variant.h"
#include "base/round_float.h"

namespace torch_ckpt {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Codes of float8_e5m2 for the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
constexpr std::array<uint8_t, 16> kE2M1 = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                           0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};

// The value of a finite code: a sign bit, exponent bits and mantissa bits.
float finite_value(uint32_t code, int mantissa_bits, int bias) {
  const auto mantissa = static_cast<float>(code & ((1U << mantissa_bits) - 1));
  const auto exponent = static_cast<int>((code & 0x7f) >> mantissa_bits);
  const float unit = std::ldexp(1.0F, std::max(exponent, 1) - bias - mantissa_bits);
  const float implicit = exponent == 0 ? 0.0F : static_cast<float>(1U << mantissa_bits);
  const float value = (mantissa + implicit) * unit;
  return (code & 0x80) != 0 ? -value : value;
}

float value_of(DType dtype, uint32_t code) {
  switch (dtype) {
    case DType::kFloat8E4M3FN:
      return (code & 0x7f) == 0x7f ? kNaN : finite_value(code, 3, 7);
    case DType::kFloat8E4M3FNUZ:
      return code == 0x80 ? kNaN : finite_value(code, 3, 8);
    case DType::kFloat8E5M2FNUZ:
      return code == 0x80 ? kNaN : finite_value(code, 2, 16);
    case DType::kFloat8E5M2:
      if ((code & 0x7f) > 0x7c) return kNaN;
      if ((code & 0x7f) == 0x7c) {
        const float infinite = std::numeric_limits<float>::infinity();
        return code == 0x7c ? infinite : -infinite;
      }
      return finite_value(code, 2, 15);
    default:  // int8
      return static_cast<float>(static_cast<int8_t>(code));
  }
}

using Values = std::array<float, 256>;

Values make_values(DType dtype) {
  Values out{};
  for (uint32_t code = 0; code < out.size(); ++code) out[code] = value_of(dtype, code);
  return out;
}

const Values& values_of(DType dtype) {
  static const std::array<Values, 5> tables = {
      make_values(DType::kFloat8E4M3FN), make_values(DType::kFloat8E4M3FNUZ),
      make_values(DType::kFloat8E5M2), make_values(DType::kFloat8E5M2FNUZ),
      make_values(DType::kInt8)};
  switch (dtype) {
    case DType::kFloat8E4M3FN:
      return tables[0];
    case DType::kFloat8E4M3FNUZ:
      return tables[1];
    case DType::kFloat8E5M2:
      return tables[2];
    case DType::kFloat8E5M2FNUZ:
      return tables[3];
    default:
      return tables[4];
  }
}

float from_float16(uint32_t half) {
  const uint32_t exponent = (half >> 10) & 0x1f;
  const uint32_t mantissa = half & 0x3ff;
  const uint32_t sign = (half & 0x8000) << 16;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | (mantissa << 13));
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                    : float_of_bits(((exponent + 112) << 23) | (mantissa << 13));
  return sign == 0 ? value : -value;
}

template <typename Number, typename Convert>
void multiply(const Values& values, const std::byte* codes, int64_t count, float scale,
              Convert convert, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) {
    const Number number = convert(values[std::to_integer<size_t>(codes[i])] * scale);
    std::memcpy(out + i * static_cast<int64_t>(sizeof(number)), &number, sizeof(number));
  }
}

// The reference.
void multiply(const std::byte* codes, int64_t count, float scale, DType from, DType to,
              std::byte* out) {
  const Values& values = values_of(from);
  switch (to) {
    case DType::kBFloat16:
      return multiply<uint16_t>(values, codes, count, scale, to_bfloat16, out);
    case DType::kFloat16:
      return multiply<uint16_t>(values, codes, count, scale, to_float16, out);
    default:
      return multiply<float>(
          values, codes, count, scale, [](float x) { return x; }, out);
  }
}

const DequantizeVariant* fastest_dequantizer() {
  static const DequantizeVariant* const avx2 = dequantize_avx2();
  return avx2;
}

const uint8_t* raw(const std::byte* bytes) { return reinterpret_cast<const uint8_t*>(bytes); }

FloatOut out_of(DType to) {
  if (to == DType::kBFloat16) return FloatOut::kBFloat16;
  return to == DType::kFloat16 ? FloatOut::kFloat16 : FloatOut::kFloat32;
}

}  // namespace

bool is_code(DType dtype) {
  return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E4M3FNUZ ||
         dtype == DType::kFloat8E5M2 || dtype == DType::kFloat8E5M2FNUZ || dtype == DType::kInt8;
}

bool is_dequantized(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

bool is_scale(DType dtype) {
  return is_dequantized(dtype) || dtype == DType::kFloat8E8M0FNU || dtype == DType::kUInt8;
}

std::span<const float> code_values(DType dtype) {
  if (dtype != DType::kFloat4E2M1FNX2) return values_of(dtype);
  static const std::array<float, kE2M1.size()> values = [] {
    std::array<float, kE2M1.size()> out{};
    for (size_t i = 0; i < out.size(); ++i) out[i] = value_of(DType::kFloat8E5M2, kE2M1[i]);
    return out;
  }();
  return values;
}

void read_scales(DType dtype, const std::byte* from, int64_t count, float* to) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  if (itemsize(dtype) == 1) {
    for (int64_t i = 0; i < count; ++i) {
      const auto exponent = std::to_integer<uint32_t>(from[i]);
      to[i] = exponent == 0 ? 0x1p-127F : float_of_bits(exponent << 23);
      if (exponent == 255 && dtype == DType::kFloat8E8M0FNU) to[i] = kNaN;
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, from + 2 * i, sizeof(bits));
    to[i] = dtype == DType::kFloat16 ? from_float16(bits) : float_of_bits(uint32_t{bits} << 16);
  }
}

void dequantize_row(const CodeRow& row, DType from, DType to, std::byte* out) {
  dequantize_row_by(fastest_dequantizer(), row, from, to, out);
}

void dequantize_row_by(const DequantizeVariant* variant, const CodeRow& row, DType from, DType to,
                       void* out) {
  const bool is_fast =
      variant != nullptr && (from == DType::kFloat8E4M3FN || from == DType::kFloat8E5M2);
  const FloatCode code = from == DType::kFloat8E5M2 ? FloatCode::kE5M2 : FloatCode::kE4M3FN;
  const int64_t size = itemsize(to);
  std::byte* products = static_cast<std::byte*>(out);
  const float* scale = row.scales;
  int64_t left = row.block - row.first;  // Numbers of the current block.
  for (int64_t i = 0; i < row.count; ++scale, left = row.block) {
    const int64_t count = std::min(left, row.count - i);
    if (is_fast) {
      variant->multiply(raw(row.codes + i), count, *scale, code, out_of(to), products + i * size);
    } else {
      multiply(row.codes + i, count, *scale, from, to, products + i * size);
    }
    i += count;
  }
}

void expand_e2m1(const std::byte* packed, int64_t begin, int64_t count, std::byte* codes) {
  int64_t i = 0;
  const auto one = [&] {
    const auto byte = std::to_integer<uint32_t>(packed[(begin + i) / 2]);
    codes[i] = std::byte{kE2M1[(begin + i) % 2 == 0 ? byte & 0xf : byte >> 4]};
    ++i;
  };
  if (count > 0 && begin % 2 != 0) one();
  if (fastest_dequantizer() != nullptr) {
    const int64_t nbytes = (count - i) / 2;
    fastest_dequantizer()->expand(raw(packed + (begin + i) / 2), nbytes,
                                  reinterpret_cast<uint8_t*>(codes + i));
    i += 2 * nbytes;
  }
  while (i < count) one();
}

}  // namespace torch_ckpt
