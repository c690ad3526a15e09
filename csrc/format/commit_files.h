#pragma once

// All that a commit publishes of a save: the bytes of `.metadata` and of `.index`, made from one
// value, and each sealed to the other.
//
// Called by the coordinator of a save, once it knows all entries and files. Who has pickled the
// metadata in Python, because a planner has put more into them than an index can say, uses
// write_metadata_trailer and write_index.

#include <cstddef>
#include <vector>

#include "base/status.h"
#include "format/index_file.h"
#include "format/metadata_pickle.h"

namespace torch_ckpt {

struct CommitFiles {
  std::vector<std::byte> metadata;  // The pickle, then its trailer.
  std::vector<std::byte> index;
};

// Of an index with entries, all but its `metadata` filled in.
// Errors: kInvalidArgument for an index that write_index or pickle_metadata refuses.
Result<CommitFiles> encode_commit_files(Index index, const StorageMeta& storage);

}  // namespace torch_ckpt
