#pragma once

// Proves that boxes fill a region: that each element of it is in exactly one box.

#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "geometry/box.h"

namespace torch_ckpt {

// A part of a region that no box contains, or that several boxes contain.
struct CoverFault {
  Box at;
  bool is_missing = false;  // Otherwise several boxes contain it.

  bool operator==(const CoverFault&) const = default;
};

// Returns a part of `wanted` that is not in exactly one box, or nullopt. Boxes may be empty, and
// may reach beyond `wanted`.
//
// For boxes in a row, such as shards along one dimension, the cost is one sort. Other boxes are cut
// into rows first: n * log(n) for a grid of n boxes.
// Requires: equal numbers of dimensions; no offset + size overflows.
std::optional<CoverFault> cover_fault(const Box& wanted, std::vector<Box> boxes);

// Checks that stored boxes have each element of a wanted box exactly once.
// Errors: kMismatch if no box contains an element; kCorruption if several do, since their values
// may differ. The message names the FQN, the wanted box and the part.
Status check_cover(std::string_view fqn, const Box& wanted, std::vector<Box> stored);

}  // namespace torch_ckpt
