#pragma once

// Flat ranges: runs of a tensor's elements in row-major order. A file window cuts a payload into
// flat ranges, and an irregular shard is a flat range. Each flat range is the union of a few boxes.

#include <cstdint>
#include <vector>

#include "geometry/box.h"

namespace torch_ckpt {

// Returns the boxes that make up the elements [begin, end) of a tensor of these sizes. The elements
// of the boxes, one box after another, are exactly that run in row-major order. Returns at most 2 *
// dims - 1 boxes (1 for a tensor without dimensions), none of them empty.
// Requires: 0 <= begin <= end <= numel(sizes).
std::vector<Box> flat_range_to_boxes(const Dims& sizes, int64_t begin, int64_t end);

}  // namespace torch_ckpt
