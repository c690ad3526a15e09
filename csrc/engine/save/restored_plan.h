#pragma once

// The plan of a save, restored from the index of its checkpoint: after a restart the same is saved
// again, and what each rank did stands in its files.
//
// Whether it is the same is not decided here: the ranks compare digests
// (torch_ckpt/planning/plan_cache.py).

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "format/stored_index.h"
#include "plan/assignment.h"
#include "plan/global_plan.h"

namespace torch_ckpt {

// What all ranks have stored. Its ranks are those in the names of data files, and its items the
// numbers of boxes in the index.
// Errors: kMismatch for data files that are not named by ranks; those of reading the index.
Result<StoredTable> restore_stored(const StoredIndex& index);

// What one rank has stored of these items, and as which of the numbers of `restore_stored`.
struct RestoredWork {
  Assignment assignment;
  std::vector<int64_t> numbers;  // Of each item that is written.
};

// Errors: kMismatch where the checkpoint is not one of these items; those of reading the index.
Result<RestoredWork> restore_work(const StoredIndex& index, const ItemTable& items, int64_t rank);

}  // namespace torch_ckpt
