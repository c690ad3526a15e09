#pragma once

// Byte spans, and checked arithmetic on their sizes.
//
// All sizes and offsets are signed 64-bit. Sizes from a file or a caller are added and multiplied
// only through the checked functions below, so a hostile header cannot overflow into a small
// allocation.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace torch_ckpt {

using Bytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

inline Bytes as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline int64_t ssize(Bytes bytes) { return static_cast<int64_t>(bytes.size()); }

// Returns `bytes[begin, begin + nbytes)`. Requires: the range is inside `bytes`.
inline Bytes slice(Bytes bytes, int64_t begin, int64_t nbytes) {
  return bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(nbytes));
}
inline MutableBytes slice(MutableBytes bytes, int64_t begin, int64_t nbytes) {
  return bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(nbytes));
}

// Returns the sum or product, or nullopt on overflow.
inline std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}
inline std::optional<int64_t> checked_mul(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// Returns whether [offset, offset + nbytes) is inside [0, limit). Never overflows.
inline bool range_within(int64_t offset, int64_t nbytes, int64_t limit) {
  return offset >= 0 && nbytes >= 0 && offset <= limit && nbytes <= limit - offset;
}

inline int64_t align_down(int64_t value, int64_t alignment) { return value - value % alignment; }
inline int64_t align_up(int64_t value, int64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// Unaligned little-endian integers. All formats of this project are little-endian.
template <typename T>
T load_le(const std::byte* from) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <typename T>
void store_le(std::byte* to, T value) {
  static_assert(std::endian::native == std::endian::little);
  std::memcpy(to, &value, sizeof(T));
}

}  // namespace torch_ckpt
