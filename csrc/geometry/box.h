#pragma once

// Boxes: half-open N-d regions of a tensor. Every shard and every stored chunk is a box.

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

// Returns whether `box` is a valid region of a tensor of these sizes: same number of dimensions, no
// negative numbers, inside the sizes. Accepts any numbers without overflow.
bool lies_within(const Box& box, const Dims& sizes);

}  // namespace torch_ckpt
