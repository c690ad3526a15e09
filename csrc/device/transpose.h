#pragma once

// Transposed copies in host memory: neighbors in the source are not neighbors in the destination.
// cpu_device.cc copies transposed tensors through it, for saves, snapshots and loads.

#include <cstddef>
#include <cstdint>

namespace torch_ckpt {

// A copy of a matrix. The elements of a column are neighbors in the destination, those of a row in
// the source: among all dimensions, rows have the shortest stride there, and columns here. Strides
// are in bytes.
struct Transposition {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t src_row_stride = 0;
  int64_t src_column_stride = 0;
  int64_t dst_row_stride = 0;
  int64_t dst_column_stride = 0;
};

// Whether `transpose` supports elements of this size.
bool can_transpose(int64_t itemsize);

// Requires: can_transpose(itemsize); source and destination do not overlap.
void transpose(const Transposition& copy, int64_t itemsize, const std::byte* src, std::byte* dst);

}  // namespace torch_ckpt
