#pragma once

// The comparison of two versions of a block, compiled for the instruction set of the including
// file: the baseline in raw_block.cc, AVX2 and AVX-512 in compare_avx2.cc and compare_avx512.cc.
// All definitions are file-local, and this header includes no C++ header, so the linker cannot
// replace a baseline function with another one.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Bytes per vector, which the including file may define: 32 for AVX2, 64 for AVX-512. The compiler
// does not define its own macros after `#pragma GCC target`.
#if !defined(TORCH_CKPT_COMPARE_VECTOR)
#define TORCH_CKPT_COMPARE_VECTOR 16
#endif

#if TORCH_CKPT_COMPARE_VECTOR >= 32
#include <immintrin.h>
#endif

namespace torch_ckpt {

// What `write_streams` has written; raw_block.h describes the streams.
struct WrittenStreams {
  size_t count;
  size_t gaps_nbytes;
  size_t wide;
};

// The positions and the XORs of changed units, with room for a vector behind them, and the numbers
// of those XORs that have more than a low byte.
struct CompareScratch {
  uint16_t positions[(64 << 10) + 64];
  unsigned char xors[(64 << 10) + 64];
  uint16_t wide[(16 << 10) + 64];
};

struct CompareVariant {
  // Appends the changed units of the bytes [begin, end) of a block to `changed` ones, and copies
  // these bytes from the source to the snapshot. Returns the new number of changed units.
  size_t (*compare)(unsigned char* snapshot, const unsigned char* source, size_t begin, size_t end,
                    size_t unit, CompareScratch* scratch, size_t changed);

  // Writes the streams of a block of `nbytes` bytes. They have room for a vector more than they
  // need.
  WrittenStreams (*write_streams)(CompareScratch* scratch, size_t changed, size_t nbytes,
                                  size_t unit, unsigned char* streams);
};

// Return null if the compiler or the CPU does not support the instructions.
const CompareVariant* compare_avx2();
const CompareVariant* compare_avx512();

namespace {

// What is compared at a time. The snapshot is not written where nothing has changed.
constexpr size_t kStepNbytes = 256;

// How far ahead memory is fetched. The processor itself does not fetch beyond a page.
constexpr size_t kAheadNbytes = 4096;

void fetch_ahead(const unsigned char* snapshot, const unsigned char* source) {
  for (size_t at = kAheadNbytes; at < kAheadNbytes + kStepNbytes; at += 64) {
    __builtin_prefetch(source + at);
    __builtin_prefetch(snapshot + at);
  }
}

template <typename Unit>
Unit load_unit(const unsigned char* from) {
  Unit unit;
  memcpy(&unit, from, sizeof(Unit));
  return unit;
}

#if TORCH_CKPT_COMPARE_VECTOR == 64

// Appends the units of a vector that are not 0. Stores whole vectors, since a compressing store is
// slow; the next ones overwrite what is too much.
template <typename Unit>
size_t append_changes(__m512i bits, size_t first, CompareScratch* scratch, size_t count) {
  unsigned char* const xors = scratch->xors + count * sizeof(Unit);
  uint16_t* const positions = scratch->positions + count;
  const __m512i index = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17,
                                         16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i places = _mm512_add_epi16(index, _mm512_set1_epi16(static_cast<short>(first)));
  if constexpr (sizeof(Unit) == 1) {
    const __mmask64 changed = _mm512_test_epi8_mask(bits, bits);
    const auto low = static_cast<__mmask32>(changed);
    const auto high = static_cast<__mmask32>(changed >> 32);
    _mm512_storeu_si512(xors, _mm512_maskz_compress_epi8(changed, bits));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi16(low, places));
    _mm512_storeu_si512(
        positions + __builtin_popcount(low),
        _mm512_maskz_compress_epi16(high, _mm512_add_epi16(places, _mm512_set1_epi16(32))));
    return count + static_cast<size_t>(__builtin_popcountll(changed));
  } else if constexpr (sizeof(Unit) == 2) {
    const __mmask32 changed = _mm512_test_epi16_mask(bits, bits);
    _mm512_storeu_si512(xors, _mm512_maskz_compress_epi16(changed, bits));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi16(changed, places));
    return count + static_cast<size_t>(__builtin_popcount(changed));
  } else if constexpr (sizeof(Unit) == 4) {
    const __mmask16 changed = _mm512_test_epi32_mask(bits, bits);
    _mm512_storeu_si512(xors, _mm512_maskz_compress_epi32(changed, bits));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi16(changed, places));
    return count + static_cast<size_t>(__builtin_popcount(changed));
  } else {
    const __mmask8 changed = _mm512_test_epi64_mask(bits, bits);
    _mm512_storeu_si512(xors, _mm512_maskz_compress_epi64(changed, bits));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi16(changed, places));
    return count + static_cast<size_t>(__builtin_popcount(changed));
  }
}

// Appends the changed units of a step, and returns the new number of them.
template <typename Unit>
size_t take_step(unsigned char* snapshot, const unsigned char* source, size_t first,
                 CompareScratch* scratch, size_t count) {
  __m512i values[4];
  __m512i bits[4];
  for (size_t i = 0; i < 4; ++i) {
    values[i] = _mm512_loadu_si512(source + 64 * i);
    bits[i] = _mm512_xor_si512(values[i], _mm512_loadu_si512(snapshot + 64 * i));
  }
  const __m512i any =
      _mm512_or_si512(_mm512_or_si512(bits[0], bits[1]), _mm512_or_si512(bits[2], bits[3]));
  if (_mm512_test_epi64_mask(any, any) == 0) return count;
  for (size_t i = 0; i < 4; ++i) {
    _mm512_storeu_si512(snapshot + 64 * i, values[i]);
    count = append_changes<Unit>(bits[i], first + i * (64 / sizeof(Unit)), scratch, count);
  }
  return count;
}

#else

// Returns one bit for each unit of 64 units that is not 0.
template <typename Unit>
uint64_t changed_units(const unsigned char* bits) {
  uint64_t changed = 0;
#if TORCH_CKPT_COMPARE_VECTOR >= 32
  const __m256i zero = _mm256_setzero_si256();
  constexpr size_t kUnits = 32 / sizeof(Unit);
  for (size_t i = 0; i < 64 / kUnits; ++i) {
    const __m256i vector = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + 32 * i));
    uint32_t mask;
    if constexpr (sizeof(Unit) == 1) {
      mask = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(vector, zero)));
    } else if constexpr (sizeof(Unit) == 2) {
      const __m256i equal = _mm256_cmpeq_epi16(vector, zero);
      mask = static_cast<uint32_t>(_mm_movemask_epi8(
          _mm_packs_epi16(_mm256_castsi256_si128(equal), _mm256_extracti128_si256(equal, 1))));
    } else if constexpr (sizeof(Unit) == 4) {
      mask = static_cast<uint32_t>(
          _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(vector, zero))));
    } else {
      mask = static_cast<uint32_t>(
          _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(vector, zero))));
    }
    changed |= static_cast<uint64_t>(mask) << (i * kUnits);
  }
  return ~changed;
#else
  for (size_t i = 0; i < 64; ++i) {
    const uint64_t is_changed = load_unit<Unit>(bits + i * sizeof(Unit)) != 0 ? 1 : 0;
    changed |= is_changed << i;
  }
  return changed;
#endif
}

// Appends the changed units of a step, and returns the new number of them.
template <typename Unit>
size_t take_step(unsigned char* snapshot, const unsigned char* source, size_t first,
                 CompareScratch* scratch, size_t count) {
  constexpr size_t kUnits = kStepNbytes / sizeof(Unit);
  // Room for 64 units in any case.
  alignas(64) unsigned char bits[kStepNbytes < 64 * sizeof(Unit) ? 64 * sizeof(Unit) : kStepNbytes];
  if constexpr (sizeof(bits) > kStepNbytes) memset(bits, 0, sizeof(bits));
  uint64_t any = 0;
  for (size_t i = 0; i < kStepNbytes; i += 8) {
    const uint64_t difference = load_unit<uint64_t>(snapshot + i) ^ load_unit<uint64_t>(source + i);
    memcpy(bits + i, &difference, 8);
    any |= difference;
  }
  if (any == 0) return count;
  memcpy(snapshot, source, kStepNbytes);
  for (size_t begin = 0; begin < kUnits; begin += 64) {
    uint64_t changed = changed_units<Unit>(bits + begin * sizeof(Unit));
    const auto end = count + static_cast<size_t>(__builtin_popcountll(changed));
    // Four at a time, so that a branch does not depend on each bit.
    while (count < end) {
      for (size_t i = 0; i < 4; ++i) {
        const auto at = begin + (static_cast<size_t>(__builtin_ctzll(changed | (1ULL << 63))));
        scratch->positions[count + i] = static_cast<uint16_t>(first + at);
        memcpy(scratch->xors + (count + i) * sizeof(Unit), bits + at * sizeof(Unit), sizeof(Unit));
        changed &= changed - 1;
      }
      count += 4;
    }
    count = end;
  }
  return count;
}

#endif

// Appends the changed units from `at`, less than a step.
template <typename Unit>
size_t take_end(unsigned char* snapshot, const unsigned char* source, size_t at, size_t nbytes,
                CompareScratch* scratch, size_t count) {
  for (; at < nbytes; at += sizeof(Unit)) {
    const auto value = load_unit<Unit>(source + at);
    const auto bits = static_cast<Unit>(load_unit<Unit>(snapshot + at) ^ value);
    if (bits == 0) continue;
    memcpy(snapshot + at, &value, sizeof(Unit));
    scratch->positions[count] = static_cast<uint16_t>(at / sizeof(Unit));
    memcpy(scratch->xors + count * sizeof(Unit), &bits, sizeof(Unit));
    ++count;
  }
  return count;
}

#if TORCH_CKPT_COMPARE_VECTOR >= 32

// Gaps, or units, that are written at a time.
constexpr size_t kGapGroup = 16;
constexpr size_t kPlaneGroup = 32;

__m256i load_vector(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// Writes the gaps before a group of positions, unless one needs more than a byte.
bool write_short_gaps(const uint16_t* positions, unsigned char* to) {
  const __m256i steps = _mm256_sub_epi16(load_vector(positions), load_vector(positions - 1));
  const __m256i gaps = _mm256_sub_epi16(steps, _mm256_set1_epi16(1));
  const __m256i above = _mm256_subs_epu16(gaps, _mm256_set1_epi16(254));
  if (_mm256_testz_si256(above, above) == 0) return false;
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packus_epi16(_mm256_castsi256_si128(gaps), _mm256_extracti128_si256(gaps, 1)));
  return true;
}

// Returns the low bytes of the units of two bytes in two vectors.
__m256i low_bytes(__m256i first, __m256i second) {
  const __m256i mask = _mm256_set1_epi16(255);
  const __m256i mixed =
      _mm256_packus_epi16(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
  return _mm256_permute4x64_epi64(mixed, 0xD8);
}

__m256i high_bytes(__m256i first, __m256i second) {
  return low_bytes(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
}

void store_vector(unsigned char* to, __m256i vector) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), vector);
}

#endif

// Returns the number of bytes.
size_t write_gaps(const uint16_t* positions, size_t count, unsigned char* to) {
  const unsigned char* const begin = to;
  unsigned next = 0;
  for (size_t i = 0; i < count; ++i) {
#if TORCH_CKPT_COMPARE_VECTOR >= 32
    for (; i > 0 && i + kGapGroup <= count && write_short_gaps(positions + i, to); i += kGapGroup) {
      to += kGapGroup;
      next = positions[i + kGapGroup - 1] + 1U;
    }
    if (i == count) break;
#endif
    unsigned gap = positions[i] - next;
    next = positions[i] + 1U;
    for (; gap >= 255; gap -= 255) *to++ = 255;
    *to++ = static_cast<unsigned char>(gap);
  }
  return static_cast<size_t>(to - begin);
}

// Writes byte p of each unit to plane p.
template <typename Unit>
void write_planes(const unsigned char* units, size_t count, unsigned char* to) {
  size_t begin = 0;
#if TORCH_CKPT_COMPARE_VECTOR >= 32
  if constexpr (sizeof(Unit) == 2) {
    for (; begin + kPlaneGroup <= count; begin += kPlaneGroup) {
      const __m256i first = load_vector(units + 2 * begin);
      const __m256i second = load_vector(units + 2 * begin + 32);
      store_vector(to + begin, low_bytes(first, second));
      store_vector(to + count + begin, high_bytes(first, second));
    }
  }
#endif
  for (size_t plane = 0; plane < sizeof(Unit); ++plane, to += count) {
    for (size_t i = begin; i < count; ++i) to[i] = units[i * sizeof(Unit) + plane];
  }
}

// Writes the low bytes of units of two bytes, and the numbers of the units that have a high byte to
// `scratch->wide`. Returns how many these are.
size_t write_low_plane(CompareScratch* scratch, size_t count, unsigned char* to) {
  const unsigned char* const units = scratch->xors;
  size_t wide = 0;
  size_t begin = 0;
#if TORCH_CKPT_COMPARE_VECTOR >= 32
  for (; begin + kPlaneGroup <= count; begin += kPlaneGroup) {
    const __m256i first = load_vector(units + 2 * begin);
    const __m256i second = load_vector(units + 2 * begin + 32);
    store_vector(to + begin, low_bytes(first, second));
    const __m256i equal = _mm256_cmpeq_epi8(high_bytes(first, second), _mm256_setzero_si256());
    for (uint32_t left = ~static_cast<uint32_t>(_mm256_movemask_epi8(equal)); left != 0;
         left &= left - 1) {
      scratch->wide[wide++] =
          static_cast<uint16_t>(begin + static_cast<size_t>(__builtin_ctz(left)));
    }
  }
#endif
  for (; begin < count; ++begin) {
    to[begin] = units[2 * begin];
    if (units[2 * begin + 1] != 0) scratch->wide[wide++] = static_cast<uint16_t>(begin);
  }
  return wide;
}

// Writes the planes of changed units. Returns how many units have a byte in the planes above the
// lowest one; if not all of them, their numbers come first.
template <typename Unit>
size_t write_changed_planes(CompareScratch* scratch, size_t count, unsigned char* to) {
  if constexpr (sizeof(Unit) == 2) {
    const size_t wide = write_low_plane(scratch, count, to);
    if (3 * wide < count) {
      memcpy(to + count, scratch->wide, 2 * wide);
      unsigned char* const high = to + count + 2 * wide;
      for (size_t i = 0; i < wide; ++i) high[i] = scratch->xors[2 * scratch->wide[i] + 1];
      return wide;
    }
  }
  write_planes<Unit>(scratch->xors, count, to);
  return count;
}

// Writes the planes of all units, of which most have changed.
template <typename Unit>
void write_all_planes(const CompareScratch* scratch, size_t changed, size_t count,
                      unsigned char* to) {
  memset(to, 0, count * sizeof(Unit));
  for (size_t i = 0; i < changed; ++i) {
    for (size_t plane = 0; plane < sizeof(Unit); ++plane) {
      to[plane * count + scratch->positions[i]] = scratch->xors[i * sizeof(Unit) + plane];
    }
  }
}

template <typename Unit>
size_t compare_units(unsigned char* snapshot, const unsigned char* source, size_t begin, size_t end,
                     CompareScratch* scratch, size_t changed) {
  size_t at = begin;
  for (; at + kStepNbytes <= end; at += kStepNbytes) {
    fetch_ahead(snapshot + at, source + at);
    changed = take_step<Unit>(snapshot + at, source + at, at / sizeof(Unit), scratch, changed);
  }
  return take_end<Unit>(snapshot, source, at, end, scratch, changed);
}

size_t compare_block(unsigned char* snapshot, const unsigned char* source, size_t begin, size_t end,
                     size_t unit, CompareScratch* scratch, size_t changed) {
  switch (unit) {
    case 1:
      return compare_units<uint8_t>(snapshot, source, begin, end, scratch, changed);
    case 2:
      return compare_units<uint16_t>(snapshot, source, begin, end, scratch, changed);
    case 4:
      return compare_units<uint32_t>(snapshot, source, begin, end, scratch, changed);
    default:
      return compare_units<uint64_t>(snapshot, source, begin, end, scratch, changed);
  }
}

template <typename Unit>
WrittenStreams write_units(CompareScratch* scratch, size_t changed, size_t nbytes,
                           unsigned char* streams) {
  const size_t count = nbytes / sizeof(Unit);
  if (2 * changed > count) {
    write_all_planes<Unit>(scratch, changed, count, streams);
    return {count, 0, count};
  }
  const size_t gaps_nbytes = write_gaps(scratch->positions, changed, streams);
  const size_t wide = write_changed_planes<Unit>(scratch, changed, streams + gaps_nbytes);
  return {changed, gaps_nbytes, wide};
}

WrittenStreams write_block(CompareScratch* scratch, size_t changed, size_t nbytes, size_t unit,
                           unsigned char* streams) {
  switch (unit) {
    case 1:
      return write_units<uint8_t>(scratch, changed, nbytes, streams);
    case 2:
      return write_units<uint16_t>(scratch, changed, nbytes, streams);
    case 4:
      return write_units<uint32_t>(scratch, changed, nbytes, streams);
    default:
      return write_units<uint64_t>(scratch, changed, nbytes, streams);
  }
}

const CompareVariant kCompareOfThisFile = {compare_block, write_block};

}  // namespace
}  // namespace torch_ckpt
