#pragma once

// What a stored tensor and a live one have in common, as copies between the two, cut so that each
// needs one run of stored bytes.

#include <cstdint>
#include <span>
#include <vector>

#include "base/strided.h"
#include "geometry/box.h"

namespace torch_ckpt {

// The half-open run of bytes [begin, end).
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t nbytes() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

// Copies the elements of `box` of a stored tensor (source; strides in bytes, its element 0 at
// `src_offset`) onto a live tensor of the box's sizes (destination; element 0 at offset 0).
// Requires: the box lies within the stored tensor, whose extent in bytes fits an int64_t, or is
// empty.
StridedCopy copy_of_box(const Box& box, int64_t itemsize, int64_t src_offset,
                        const Dims& src_strides, const Dims& dst_strides);

// The smallest run that holds every source byte of the copy.
// Requires: the copy has elements, and no negative source stride.
ByteRange source_range(const StridedCopy& copy);

// Whether the copy is one run of bytes on both sides.
bool is_one_run(const StridedCopy& copy);

// The elements of such a copy whose source bytes lie in `part`.
// Requires: `part` begins and ends between elements, within the source range.
StridedCopy part_of_run(const StridedCopy& run, const ByteRange& part);

// Unwanted bytes up to this many are not worth a request of their own: a disk reads whole blocks.
inline constexpr int64_t kSmallGap = 4096;

// Cuts a copy into copies that together do the same, each of whose source range
//   - is at most `max_nbytes` long (or one element), and
//   - contains no gap of more than `max_gap` unwanted bytes, nor one longer than both the rows
//     beside it and kSmallGap, as far as splitting by whole rows can avoid it.
// In ascending order of their first source byte where dimensions do not interleave.
// Requires: as for source_range; max_nbytes > 0; max_gap >= 0. No copies where there are no
// elements.
std::vector<StridedCopy> split_by_source(const StridedCopy& copy, int64_t max_nbytes,
                                         int64_t max_gap);

}  // namespace torch_ckpt
