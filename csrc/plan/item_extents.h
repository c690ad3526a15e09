#pragma once

// Where a rank has stored its items in one data file: what it reports to the coordinator, which
// knows from the plan what they are.
//
// As bytes: a frame of wire.h (magic "TCEX", version 1) around a varint, the count of items, and
// then for each, in ascending order of items:
//   varint    how many items are skipped since the former one, or from the first on
//   varint    its offset, as the distance from the end of the former one: twice that, or for one
//             that lies before it, twice the distance, less 1
//   varint    twice its nbytes, plus 1 where it is plain

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

struct ItemExtent {
  int64_t item = 0;  // Of the rank's own table.
  int64_t offset = 0;
  int64_t nbytes = 0;
  bool plain = false;  // As of IndexedBox: whether it is a frame of ours.

  bool operator==(const ItemExtent&) const = default;
};

// In any order. Requires: no number is negative, no item is there twice, and no extent reaches
// 2^61.
std::vector<std::byte> encode(std::vector<ItemExtent> extents);

// Ascending by item; or kCorruption, or kUnsupported for another version.
Result<std::vector<ItemExtent>> decode_extents(Bytes bytes);

}  // namespace torch_ckpt
