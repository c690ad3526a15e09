#pragma once

// The overlap of a stored tensor and a live tensor, as strided copies from one to the other. The
// copies are cut so that one read of a contiguous byte range serves each copy.

#include <cstdint>
#include <span>
#include <vector>

#include "base/strided.h"
#include "geometry/box.h"

namespace torch_ckpt {

// The half-open byte range [begin, end).
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t nbytes() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

// Returns the copy from `box` of a stored tensor to a live tensor of the box's sizes. The source
// has strides in bytes, and its element 0 is at `src_offset`. The destination's element 0 is at
// offset 0.
// Requires: the box lies within the stored tensor or is empty; the extent of the stored tensor in
// bytes fits an int64_t.
StridedCopy copy_of_box(const Box& box, int64_t itemsize, int64_t src_offset,
                        const Dims& src_strides, const Dims& dst_strides);

// Returns the smallest range that contains every source byte of the copy.
// Requires: the copy has elements and no negative source stride.
ByteRange source_range(const StridedCopy& copy);

// Returns whether the copy is one contiguous byte range on both sides.
bool is_one_run(const StridedCopy& copy);

// Narrows a contiguous copy to the elements whose source bytes lie in `range`.
// Requires: is_one_run(run); `range` is within the source range and cuts no element.
StridedCopy slice_run(const StridedCopy& run, const ByteRange& range);

// A gap of at most this many bytes is read through: a disk reads whole blocks anyway.
inline constexpr int64_t kSmallGap = 4096;

// Splits a copy into copies with limited source ranges. Together, the results copy the same
// elements. Each source range
//   - has at most `max_nbytes` bytes, unless the copy is a single element;
//   - has no gap of more than `max_gap` unwanted bytes;
//   - has no gap longer than both kSmallGap and the rows beside the gap.
//
// The limits on gaps apply where splitting between whole rows can avoid a gap. The results are in
// ascending order of their first source byte, unless dimensions interleave. A copy without elements
// has no results.
// Requires: no negative source stride; max_nbytes > 0; max_gap >= 0.
std::vector<StridedCopy> split_by_source(const StridedCopy& copy, int64_t max_nbytes,
                                         int64_t max_gap);

}  // namespace torch_ckpt
