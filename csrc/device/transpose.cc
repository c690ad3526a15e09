#include "device/transpose.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_ckpt {
namespace {

// A tile is as long as a cache line in both directions. So a copy reads each line of the source
// once and writes each line of the destination once, however far apart they lie. Without tiles,
// every element misses the cache on one side.
constexpr int64_t kLine = 64;

// Length of a strip of a thin matrix: both sides fit the first-level cache.
constexpr int64_t kStrip = 1024;

// Tiles of fewer rows or columns would be mostly empty.
constexpr int64_t kFewest = 8;

constexpr int64_t kVector = 16;

struct Bytes16 {
  uint64_t words[2];
};

// Interleaves half 0 or half 1 of two vectors: a0 b0 a1 b1 ...
template <size_t kHalf, typename Vector, size_t... kIndex>
Vector interleave(Vector a, Vector b, std::index_sequence<kIndex...>) {
  constexpr size_t kCount = sizeof...(kIndex);
  return __builtin_shufflevector(a, b, (kHalf * kCount / 2 + kIndex / 2 + kIndex % 2 * kCount)...);
}

// Transposes a square block in registers. Rows of `src` and `dst` are lines. To interleave the
// halves of all rows once for each bit of the row number is to transpose.
template <typename Unit>
void transpose_block(const std::byte* src, std::byte* dst) {
  constexpr size_t kCount = kVector / sizeof(Unit);
  constexpr auto kIndex = std::make_index_sequence<kCount>();
  typedef Unit Vector [[gnu::vector_size(kVector)]];
  Vector rows[kCount];
#pragma GCC unroll 16
  for (size_t i = 0; i < kCount; ++i) std::memcpy(&rows[i], src + i * kLine, kVector);
#pragma GCC unroll 4
  for (size_t bit = 1; bit < kCount; bit *= 2) {
    Vector next[kCount];
#pragma GCC unroll 8
    for (size_t i = 0; i < kCount / 2; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + kCount / 2], kIndex);
      next[2 * i + 1] = interleave<1>(rows[i], rows[i + kCount / 2], kIndex);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < kCount; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < kCount; ++i) std::memcpy(dst + i * kLine, &rows[i], kVector);
}

template <>
void transpose_block<Bytes16>(const std::byte* src, std::byte* dst) {
  std::memcpy(dst, src, kVector);
}

template <int64_t kSize>
void copy_elements(const std::byte* src, int64_t src_stride, std::byte* dst, int64_t dst_stride,
                   int64_t count) {
  if (src_stride == kSize && dst_stride == kSize && count == kLine / kSize) {
    std::memcpy(dst, src, kLine);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * src_stride, kSize);
  }
}

// Copies a tile through two buffers, so that lines which share a cache set do not evict each other
// half-used.
template <typename Unit>
void transpose_tile(const Transposition& tile, const std::byte* src, std::byte* dst) {
  constexpr int64_t kSize = sizeof(Unit);
  constexpr int64_t kBlock = kVector / kSize;
  alignas(kLine) std::byte in[kLine / kSize * kLine];
  alignas(kLine) std::byte out[kLine / kSize * kLine];
  for (int64_t c = 0; c < tile.columns; ++c) {
    __builtin_prefetch(dst + c * tile.dst_column_stride, 1);
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    copy_elements<kSize>(src + r * tile.src_row_stride, tile.src_column_stride, in + r * kLine,
                         kSize, tile.columns);
  }
  for (int64_t r = 0; r < tile.rows; r += kBlock) {
    for (int64_t c = 0; c < tile.columns; c += kBlock) {
      transpose_block<Unit>(in + r * kLine + c * kSize, out + c * kLine + r * kSize);
    }
  }
  for (int64_t c = 0; c < tile.columns; ++c) {
    copy_elements<kSize>(out + c * kLine, kSize, dst + c * tile.dst_column_stride,
                         tile.dst_row_stride, tile.rows);
  }
}

// Copies a matrix of few rows or few columns along its longer side, in strips that fit the cache.
template <int64_t kSize>
void transpose_thin(const Transposition& copy, const std::byte* src, std::byte* dst) {
  const bool few_rows = copy.rows < copy.columns;
  const int64_t src_step = few_rows ? copy.src_column_stride : copy.src_row_stride;
  const int64_t dst_step = few_rows ? copy.dst_column_stride : copy.dst_row_stride;
  const int64_t src_line = few_rows ? copy.src_row_stride : copy.src_column_stride;
  const int64_t dst_line = few_rows ? copy.dst_row_stride : copy.dst_column_stride;
  const int64_t length = std::max(copy.rows, copy.columns);
  for (int64_t begin = 0; begin < length; begin += kStrip) {
    for (int64_t i = 0; i < std::min(copy.rows, copy.columns); ++i) {
      copy_elements<kSize>(src + i * src_line + begin * src_step, src_step,
                           dst + i * dst_line + begin * dst_step, dst_step,
                           std::min(kStrip, length - begin));
    }
  }
}

template <typename Unit>
void transpose_units(const Transposition& copy, const std::byte* src, std::byte* dst) {
  constexpr int64_t kSide = kLine / sizeof(Unit);
  if (std::min(copy.rows, copy.columns) < kFewest) {
    return transpose_thin<sizeof(Unit)>(copy, src, dst);
  }
  const auto copy_tile = [&](int64_t row, int64_t column) {
    Transposition tile = copy;
    tile.rows = std::min(kSide, copy.rows - row);
    tile.columns = std::min(kSide, copy.columns - column);
    transpose_tile<Unit>(tile, src + row * copy.src_row_stride + column * copy.src_column_stride,
                         dst + row * copy.dst_row_stride + column * copy.dst_column_stride);
  };
  // The longer side is often the distance between runs of a large tensor, of which the matrix is a
  // window. Tiles along the shorter side complete each run before the next one.
  if (copy.rows < copy.columns) {
    for (int64_t column = 0; column < copy.columns; column += kSide) {
      for (int64_t row = 0; row < copy.rows; row += kSide) copy_tile(row, column);
    }
  } else {
    for (int64_t row = 0; row < copy.rows; row += kSide) {
      for (int64_t column = 0; column < copy.columns; column += kSide) copy_tile(row, column);
    }
  }
}

}  // namespace

bool can_transpose(int64_t itemsize) {
  return itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8 || itemsize == 16;
}

void transpose(const Transposition& copy, int64_t itemsize, const std::byte* src, std::byte* dst) {
  switch (itemsize) {
    case 1:
      return transpose_units<uint8_t>(copy, src, dst);
    case 2:
      return transpose_units<uint16_t>(copy, src, dst);
    case 4:
      return transpose_units<uint32_t>(copy, src, dst);
    case 8:
      return transpose_units<uint64_t>(copy, src, dst);
    case 16:
      return transpose_units<Bytes16>(copy, src, dst);
    default:
      return;
  }
}

}  // namespace torch_ckpt
