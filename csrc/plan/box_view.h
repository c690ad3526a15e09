#pragma once

// A non-owning view of a box, as std::span is of a vector. Plans have millions of boxes, so boxes
// share pools of numbers instead of owning memory.

#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "geometry/box.h"

namespace torch_ckpt {

// Valid as long as the pool of numbers.
struct BoxView {
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;
};

inline Dims to_dims(std::span<const int64_t> values) { return {values.begin(), values.end()}; }

inline Box to_box(const BoxView& view) { return {to_dims(view.offsets), to_dims(view.sizes)}; }

// Returns the number of elements, or nullopt on overflow. Requires: no size is negative.
inline std::optional<int64_t> checked_volume(std::span<const int64_t> sizes) {
  int64_t volume = 1;
  bool fits = true;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;  // Empty, even if the product of the other sizes overflows.
    fits &= !__builtin_mul_overflow(volume, size, &volume);
  }
  if (!fits) return std::nullopt;
  return volume;
}

// Returns whether a box lies inside a tensor of these sizes. Requires: equal numbers of dimensions.
inline bool lies_within(const BoxView& box, std::span<const int64_t> sizes) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!range_within(box.offsets[d], box.sizes[d], sizes[d])) return false;
  }
  return true;
}

// Returns whether two boxes share an element.
// Requires: neither is empty; equal numbers of dimensions.
inline bool overlap(const BoxView& a, const BoxView& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.offsets[d] >= b.offsets[d] + b.sizes[d] || b.offsets[d] >= a.offsets[d] + a.sizes[d]) {
      return false;
    }
  }
  return true;
}

}  // namespace torch_ckpt
