#pragma once

// The assignment of one rank: which of its listed items it writes. The coordinator sends it in
// reply to the rank's plan.
//
// The encoding is a frame of wire.h (magic "TCAS", version 1):
//
//   varint    number of items that the rank listed
//   varint    number of runs, then for each:
//     varint    number of items skipped since the previous run
//     varint    number of items in the run; not 0
//   varint    number of cuts, then for each:
//     varint    number of items skipped since the previous cut's item, or since the first item
//     varints   first row, number of rows; the number is not 0

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "plan/item.h"

namespace torch_ckpt {

// A run of written items: [first, first + count).
struct Run {
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const Run&) const = default;
};

// A cut item: only rows [first_row, first_row + rows) of the first dimension are written.
struct Cut {
  int64_t item = 0;
  int64_t first_row = 0;
  int64_t rows = 0;

  bool operator==(const Cut&) const = default;
};

struct Assignment {
  int64_t item_count = 0;  // Number of items in the rank's table.
  std::vector<Run> runs;   // Ascending; neither empty nor adjacent.
  std::vector<Cut> cuts;   // Ascending by item, at most one per item, only for written items.

  bool operator==(const Assignment&) const = default;
};

std::vector<std::byte> encode(const Assignment& assignment);

// Decodes an assignment. Errors: kCorruption; kUnsupported for another version.
Result<Assignment> decode_assignment(Bytes bytes);

// Checks an assignment against the items it is for. Must be called before the assignment is used.
// Errors: kCorruption if the table has another length, or if a cut item is opaque or lacks these
// rows.
Status check_assignment(const Assignment& assignment, const ItemTable& table);

// Returns the box of a cut item.
// Requires: check_assignment is OK.
Box cut_box(const BoxView& box, const Cut& cut);

}  // namespace torch_ckpt
