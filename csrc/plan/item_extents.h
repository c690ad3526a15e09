#pragma once

// The extents of a rank's items in one data file. Each rank reports them to the coordinator, which
// has the description of the items from the plan.
//
// The encoding is a frame of wire.h (magic "TCEX", version 1). The body is a varint with the number
// of items, then for each item in ascending order:
//   varint    number of items skipped since the previous one, or since the start of the table
//   varint    offset, as the signed distance d from the end of the previous extent: 2 * d, or
//             -2 * d - 1 for a negative d
//   varint    2 * nbytes, plus 1 if the extent is plain

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

struct ItemExtent {
  int64_t item = 0;  // Index in the rank's own table.
  int64_t offset = 0;
  int64_t nbytes = 0;
  bool plain = false;  // Same meaning as IndexedBox::plain; false if only torch can read the bytes.

  bool operator==(const ItemExtent&) const = default;
};

// Encodes extents in any order.
// Requires: no number is negative, items are unique, and every extent ends below 2^61.
std::vector<std::byte> encode(std::vector<ItemExtent> extents);

// Returns the extents in ascending order of items. Errors: kCorruption; kUnsupported for another
// version.
Result<std::vector<ItemExtent>> decode_extents(Bytes bytes);

}  // namespace torch_ckpt
