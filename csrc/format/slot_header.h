#pragma once

// The first page of a slot: what is in this piece of shared memory, stated by the memory itself, so
// that whoever finds it can tell, though all processes are gone that knew. FORMAT.md has every
// byte.
//
// A page says that its slot is complete in one word, which is set last and cleared first: whatever
// ends the process that fills a slot, the slot is never taken for complete.

#include <array>
#include <cstdint>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

inline constexpr int64_t kSlotPage = 4096;

// Anything that tells one from another, by chance alone.
using SlotId = std::array<std::byte, 16>;

struct SlotHeader {
  SlotId run = {};       // Training that goes on from restart to restart.
  SlotId session = {};   // Processes that have started together: one life of the run.
  int64_t sequence = 0;  // Which save of the session. All ranks count alike.
  int64_t step = 0;      // What the user calls it.
  int64_t rank = 0;
  int64_t world_size = 0;
  int64_t node = 0;  // The machine, of so many that the ranks are on.
  int64_t node_count = 1;
  int64_t ranks_here = 1;    // How many of the ranks are on this machine.
  int64_t persist = 1;       // Whether it is to be brought to disk without being asked again.
  int64_t holder = 0;        // The rank that has filled it; `rank`, unless it is a copy for a peer.
  int64_t table_nbytes = 0;  // What follows the page: which items, and where they lie.
  uint64_t table_sum = 0;    // Their XXH3-64.
  int64_t payload_begin = 0;  // From the start of the slot.
  int64_t payload_nbytes = 0;
  SlotId tensors_id = {};  // Stands for the tensors that the rank held.
  SlotId share =
      {};  // Stands for how ranks of a machine have shared these out; zeros: each has all.

  bool operator==(const SlotHeader&) const = default;
};

// Says that nothing is in the slot. Requires: a page at a multiple of 8.
void clear_slot(MutableBytes page);

// Says what is in the slot, once all else is there. Requires: as above.
void complete_slot(MutableBytes page, const SlotHeader& header);

// What is in a slot of `nbytes` in all. kNotFound where nothing complete is; kCorruption for a page
// that `complete_slot` has not written; kUnsupported for one of another version.
Result<SlotHeader> read_slot_header(Bytes page, int64_t nbytes);

}  // namespace torch_ckpt
