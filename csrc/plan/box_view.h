#pragma once

// A box that lies in somebody's pool of numbers: what `Box` is to a vector, this is to a span.
// Plans hold millions of boxes, so none of them has memory of its own.

#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "geometry/box.h"

namespace torch_ckpt {

// Valid as long as the pool that it points into.
struct BoxView {
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;
};

inline Dims to_dims(std::span<const int64_t> values) { return {values.begin(), values.end()}; }

inline Box to_box(const BoxView& view) { return {to_dims(view.offsets), to_dims(view.sizes)}; }

// The number of elements, or nothing where it does not fit. Requires: no size is negative.
inline std::optional<int64_t> checked_volume(std::span<const int64_t> sizes) {
  int64_t volume = 1;
  bool fits = true;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;  // Empty, however large the other sizes are.
    fits &= !__builtin_mul_overflow(volume, size, &volume);
  }
  if (!fits) return std::nullopt;
  return volume;
}

// Whether a box lies inside a tensor of these sizes, of as many dimensions.
inline bool lies_within(const BoxView& box, std::span<const int64_t> sizes) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!range_within(box.offsets[d], box.sizes[d], sizes[d])) return false;
  }
  return true;
}

// Whether two boxes of as many dimensions have an element in common. Requires: neither is empty.
inline bool overlap(const BoxView& a, const BoxView& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.offsets[d] >= b.offsets[d] + b.sizes[d] || b.offsets[d] >= a.offsets[d] + a.sizes[d]) {
      return false;
    }
  }
  return true;
}

}  // namespace torch_ckpt
