#pragma once

// Strided copies as plain values. `geometry` computes them, `device` executes them.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_ckpt {

// One number per dimension: sizes, offsets or strides.
using Dims = std::vector<int64_t>;

// "[2, 3]"
std::string to_string(const Dims& dims);

// Returns the number of elements, or nullopt if a size is negative or the product overflows.
std::optional<int64_t> checked_numel(const Dims& sizes);

// Returns the strides of a row-major tensor, in elements. A size of 0 counts as 1.
// Requires: the product of the sizes, with 0 counted as 1, fits an int64_t.
Dims contiguous_strides(const Dims& sizes);

// A copy of every element of an N-d region from one memory to another. Offsets and strides are in
// bytes, relative to base addresses that the executor of the copy supplies.
struct StridedCopy {
  int64_t itemsize = 1;  // Bytes per element.
  Dims sizes;            // Sizes in elements; zero dimensions mean one element.
  int64_t src_offset = 0;
  Dims src_strides;
  int64_t dst_offset = 0;
  Dims dst_strides;

  bool operator==(const StridedCopy&) const = default;
};

// Returns the same copy in fewer dimensions. Dimensions of size 1 are dropped, and adjacent
// dimensions that are contiguous on both sides are merged. The last dimension stays the innermost.
StridedCopy simplified(const StridedCopy& copy);

}  // namespace torch_ckpt
