// Dequantisation with AVX2. A float8 number becomes a float16 number by shifts, which F16C converts
// to float32 at full speed, subnormal numbers included.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,f16c")
#include <immintrin.h>
#include <string.h>
#define TORCH_CKPT_HAVE_AVX2 1
#else
#define TORCH_CKPT_HAVE_AVX2 0
#endif

#include "base/dequantize_variant.h"

namespace torch_ckpt {
#if TORCH_CKPT_HAVE_AVX2
namespace {

constexpr int64_t kStep = 16;  // Numbers at a time.

// Returns float16 numbers: those of e5m2, or 2 ** -8 times those of e4m3fn.
template <FloatCode kFrom>
__m256i to_half(__m256i codes) {
  if constexpr (kFrom == FloatCode::kE5M2) return _mm256_slli_epi16(codes, 8);
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), codes), 8);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
  return _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
}

// Two multiplications, since the scale times 256 may be infinite.
template <FloatCode kFrom>
__m256 product(__m128i half, __m256 scale) {
  const __m256 value = _mm256_cvtph_ps(half);
  if constexpr (kFrom == FloatCode::kE5M2) return _mm256_mul_ps(value, scale);
  return _mm256_mul_ps(_mm256_mul_ps(value, _mm256_set1_ps(256.0F)), scale);
}

// The upper halves, rounded to the nearest even number. Requires: a NaN has zeros in its low half.
__m256i to_bfloat16(__m256 floats) {
  const __m256i bits = _mm256_castps_si256(floats);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
}

template <FloatOut kTo>
void store(__m256 low, __m256 high, char* out) {
  if constexpr (kTo == FloatOut::kFloat32) {
    _mm256_storeu_ps(reinterpret_cast<float*>(out), low);
    _mm256_storeu_ps(reinterpret_cast<float*>(out) + 8, high);
  } else if constexpr (kTo == FloatOut::kBFloat16) {
    const __m256i packed = _mm256_packus_epi32(to_bfloat16(low), to_bfloat16(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(packed, 0xd8));
  } else {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(low, kNearest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + 1, _mm256_cvtps_ph(high, kNearest));
  }
}

template <FloatCode kFrom, FloatOut kTo>
void multiply_step(const uint8_t* codes, __m256 scale, char* out) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i half = to_half<kFrom>(_mm256_cvtepu8_epi16(raw));
  store<kTo>(product<kFrom>(_mm256_castsi256_si128(half), scale),
             product<kFrom>(_mm256_extracti128_si256(half, 1), scale), out);
}

template <FloatCode kFrom, FloatOut kTo>
void multiply(const uint8_t* codes, int64_t count, float scale, void* to) {
  constexpr int64_t kItemsize = kTo == FloatOut::kFloat32 ? 4 : 2;
  const __m256 scales =
      scale == scale ? _mm256_set1_ps(scale) : _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  char* out = static_cast<char*>(to);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    multiply_step<kFrom, kTo>(codes + i, scales, out + i * kItemsize);
  }
  if (i == count) return;
  uint8_t last[kStep] = {};
  char products[kStep * kItemsize];
  memcpy(last, codes + i, static_cast<size_t>(count - i));
  multiply_step<kFrom, kTo>(last, scales, products);
  memcpy(out + i * kItemsize, products, static_cast<size_t>((count - i) * kItemsize));
}

template <FloatCode kFrom>
void multiply_from(const uint8_t* codes, int64_t count, float scale, FloatOut to, void* out) {
  switch (to) {
    case FloatOut::kFloat32:
      return multiply<kFrom, FloatOut::kFloat32>(codes, count, scale, out);
    case FloatOut::kBFloat16:
      return multiply<kFrom, FloatOut::kBFloat16>(codes, count, scale, out);
    case FloatOut::kFloat16:
      return multiply<kFrom, FloatOut::kFloat16>(codes, count, scale, out);
  }
}

void multiply_any(const uint8_t* codes, int64_t count, float scale, FloatCode from, FloatOut to,
                  void* out) {
  if (from == FloatCode::kE5M2) {
    return multiply_from<FloatCode::kE5M2>(codes, count, scale, to, out);
  }
  return multiply_from<FloatCode::kE4M3FN>(codes, count, scale, to, out);
}

void expand(const uint8_t* packed, int64_t nbytes, uint8_t* codes) {
  const auto negative = [](int code) { return static_cast<char>(code | 0x80); };
  const __m128i table =
      _mm_setr_epi8(0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, negative(0x00), negative(0x38),
                    negative(0x3c), negative(0x3e), negative(0x40), negative(0x42), negative(0x44),
                    negative(0x46));
  const __m128i low_half = _mm_set1_epi8(0x0f);
  const auto step = [&](const uint8_t* from, uint8_t* to) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(raw, low_half));
    const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(raw, 4), low_half));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm_unpackhi_epi8(low, high));
  };
  int64_t i = 0;
  for (; i + kStep <= nbytes; i += kStep) step(packed + i, codes + 2 * i);
  if (i == nbytes) return;
  uint8_t last[kStep] = {};
  uint8_t expanded[2 * kStep];
  memcpy(last, packed + i, static_cast<size_t>(nbytes - i));
  step(last, expanded);
  memcpy(codes + 2 * i, expanded, static_cast<size_t>(2 * (nbytes - i)));
}

const DequantizeVariant kAvx2 = {multiply_any, expand};

}  // namespace
#endif

const DequantizeVariant* dequantize_avx2() {
#if TORCH_CKPT_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return &kAvx2;
#endif
  return nullptr;
}

}  // namespace torch_ckpt
