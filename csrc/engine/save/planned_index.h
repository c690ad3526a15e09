#pragma once

// The index of a save that was planned here: what was planned, brought together with where each
// rank says that it has stored its part.
//
// It goes from columns to columns: a save of a million shards makes no object of Python for each.
// The coordinator calls it before it commits, and whatever is missing or too much fails the save.

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "format/index_file.h"
#include "plan/global_plan.h"

namespace torch_ckpt {

// A data file, as the rank reports it that wrote it.
struct RankFile {
  int64_t rank = 0;
  IndexedFile file;
  Bytes extents;  // As item_extents.h encodes them.
};

// An index with these files and all entries; the caller adds what concerns the checkpoint as a
// whole. kInternal, naming FQN and rank, where a box was not stored, or naming rank, item and file
// where one was that was not planned, or twice; kCorruption and kUnsupported where a report cannot
// be read.
Result<Index> planned_index(const StoredTable& stored, std::vector<RankFile> files);

}  // namespace torch_ckpt
