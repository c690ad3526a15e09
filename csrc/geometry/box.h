#pragma once

// Boxes: half-open N-d regions of a tensor, the shape of every shard and stored chunk.

#include <cstdint>
#include <string>

#include "base/strided.h"

namespace torch_ckpt {

// The elements with offsets[d] <= index[d] < offsets[d] + sizes[d].
struct Box {
  Dims offsets;
  Dims sizes;

  bool operator==(const Box&) const = default;
};

// "[2:4, 0:8]"
std::string to_string(const Box& box);

// Whether `box` is a region of a tensor of these sizes: as many dimensions, nothing negative,
// nothing outside. Safe for any numbers.
bool lies_within(const Box& box, const Dims& sizes);

}  // namespace torch_ckpt
