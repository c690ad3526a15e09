#pragma once

// What one rank is to write of the items that it listed: the coordinator's answer to its plan.
//
// As bytes: a frame of wire.h (magic "TCAS", version 1) around
//
//   varint    count of the items that the rank listed
//   varint    count of runs, then each:
//     varint    how many items are skipped before it
//     varint    how many items it has; not 0
//   varint    count of cuts, then each:
//     varint    how many items are skipped since the item of the former cut, or from the first on
//     varints   first row, count of rows; the count is not 0

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "plan/item.h"

namespace torch_ckpt {

// Items [first, first + count) are written.
struct Run {
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const Run&) const = default;
};

// Of this item only [first_row, first_row + rows) along the first dimension is written.
struct Cut {
  int64_t item = 0;
  int64_t first_row = 0;
  int64_t rows = 0;

  bool operator==(const Cut&) const = default;
};

struct Assignment {
  int64_t item_count = 0;  // Of the table that it is for.
  std::vector<Run> runs;   // Ascending, neither empty nor adjoining.
  std::vector<Cut>
      cuts;  // Ascending by item, at most one an item, each of an item that is written.

  bool operator==(const Assignment&) const = default;
};

std::vector<std::byte> encode(const Assignment& assignment);

// The assignment as it is described above, or kCorruption, or kUnsupported for another version.
Result<Assignment> decode_assignment(Bytes bytes);

// Whether it can be one of these items: kCorruption where it is for a table of another length, or
// cuts what has no such rows or is opaque. To be called before it is followed.
Status check_assignment(const Assignment& assignment, const ItemTable& table);

// What is left of a box. Requires: check_assignment found the cut sound.
Box cut_box(const BoxView& box, const Cut& cut);

}  // namespace torch_ckpt
