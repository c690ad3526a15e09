#pragma once

// Flat ranges: a run of elements of a tensor counted in row-major order. A window of a data file
// cuts a payload at any element, and an irregular shard is one such run; either is a few boxes.

#include <cstdint>
#include <vector>

#include "geometry/box.h"

namespace torch_ckpt {

// The boxes that make up the elements [begin, end) of a tensor of these sizes, in row-major order:
// the boxes' own elements, one box after another, are exactly that run. At most 2 * dims - 1 of
// them (1 without dimensions), none empty.
// Requires: 0 <= begin <= end <= numel(sizes).
std::vector<Box> flat_range_to_boxes(const Dims& sizes, int64_t begin, int64_t end);

}  // namespace torch_ckpt
