#pragma once

// Strided regions of memory, as plain values: `geometry` works them out, `device` carries them out.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_ckpt {

// One number a dimension: sizes, offsets or strides.
using Dims = std::vector<int64_t>;

// "[2, 3]"
std::string to_string(const Dims& dims);

// The number of elements, or nothing where a size is negative or the product does not fit.
std::optional<int64_t> checked_numel(const Dims& sizes);

// Strides of a row-major tensor, in elements, a size of 0 counting as 1.
// Requires: the product of the sizes, counted so, fits an int64_t.
Dims contiguous_strides(const Dims& sizes);

// Copy every element of an N-d region from one memory to another. Offsets and strides are in bytes,
// relative to a base address that the caller names when it runs the copy.
struct StridedCopy {
  int64_t itemsize = 1;  // Bytes an element.
  Dims sizes;            // In elements; no dimension at all means one element.
  int64_t src_offset = 0;
  Dims src_strides;
  int64_t dst_offset = 0;
  Dims dst_strides;

  bool operator==(const StridedCopy&) const = default;
};

// The same copy in fewer dimensions: those of size 1 dropped, neighbours that are contiguous on
// both sides merged. The last dimension stays the innermost.
StridedCopy simplified(const StridedCopy& copy);

}  // namespace torch_ckpt
