#pragma once

// Builds the index of a natively planned save from the global plan and the extents that each rank
// reports.
//
// Input and output are columns, so a save of a million shards creates no Python object per shard.
// The coordinator calls it before the commit. A missing or surplus extent fails the save.

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "format/index_file.h"
#include "plan/global_plan.h"

namespace torch_ckpt {

// A data file, as reported by the rank that wrote it.
struct RankFile {
  int64_t rank = 0;
  IndexedFile file;
  Bytes extents;  // Encoded as in item_extents.h.
  Bytes digests;  // SliceDigests.
};

// Returns an index with these files and all entries. The caller adds the fields of the checkpoint
// as a whole.
// Errors: kInternal, with FQN and rank, if a box was not stored; kInternal, with rank, item and
// file, if an item was stored twice or was not planned; kCorruption or kUnsupported for an
// unreadable report.
Result<Index> planned_index(const StoredTable& stored, std::vector<RankFile> files);

}  // namespace torch_ckpt
