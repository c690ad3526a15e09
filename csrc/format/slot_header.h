#pragma once

// SlotHeader: the first page of a slot, which describes the snapshot in this shared memory. With
// it, an agent or a restarted rank identifies a snapshot whose writer has ended. FORMAT.md states
// every byte.
//
// One word of the page marks the slot as complete. The writer clears this word first and sets it
// last. So a slot is never complete if its writer ended in between.

#include <array>
#include <cstdint>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

inline constexpr int64_t kSlotPage = 4096;

// A hash or random bytes; equal ids occur only by accident.
using SlotId = std::array<std::byte, 16>;

struct SlotHeader {
  SlotId run = {};       // Training run; the same after a restart.
  SlotId session = {};   // Processes that started together; new after each restart of the run.
  int64_t sequence = 0;  // Number of the save within the session, equal on all ranks.
  int64_t step = 0;      // Training step, chosen by the user.
  int64_t rank = 0;      // Rank that filled the slot.
  int64_t world_size = 0;
  int64_t node = 0;           // Number of the machine, in [0, node_count).
  int64_t node_count = 1;     // Number of machines of the session.
  int64_t ranks_here = 1;     // Number of ranks on this machine.
  int64_t persist = 1;        // 1 if the agent writes the snapshot to disk unasked, else 0.
  int64_t table_nbytes = 0;   // Length of the table of items and extents behind the page.
  uint64_t table_sum = 0;     // XXH3-64 of the table.
  int64_t payload_begin = 0;  // Byte offset of the payload in the slot.
  int64_t payload_nbytes = 0;
  SlotId tensors_id = {};  // Digest of the list of the rank's tensors.
  // Digest of the division of replicas among the ranks of the machine. Zeros if the snapshot has
  // all tensors of the rank.
  SlotId share = {};

  bool operator==(const SlotHeader&) const = default;
};

// Marks the slot as empty. Requires: the page begins at a multiple of 8.
void clear_slot(MutableBytes page);

// Writes the header, and marks the slot as complete. Requires: table and payload are written; the
// page begins at a multiple of 8.
void complete_slot(MutableBytes page, const SlotHeader& header);

// Decodes the header of a slot of `nbytes` bytes. Errors: kNotFound if the slot is not complete;
// kCorruption for a page that `complete_slot` did not write, in this version; kUnsupported for a
// later version.
Result<SlotHeader> read_slot_header(Bytes page, int64_t nbytes);

}  // namespace torch_ckpt
