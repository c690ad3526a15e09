#pragma once

// Encodes the two files that a commit publishes, `.metadata` and its index, from one `Index`. Both
// state the same save id, and the length and checksum of the pickle.
//
// The coordinator of a save calls it when all entries and files are final. If a planner stores
// values that an index cannot represent, Python pickles the metadata and the caller uses
// write_metadata_trailer and write_index instead.

#include <cstddef>
#include <vector>

#include "base/status.h"
#include "format/index_file.h"
#include "format/metadata_pickle.h"

namespace torch_ckpt {

struct CommitFiles {
  std::vector<std::byte> metadata;  // Pickle and trailer.
  std::vector<std::byte> index;
};

// Requires: `index` is complete except for `index.metadata`.
// Errors: kInvalidArgument if the index has no entries, or write_index or pickle_metadata rejects
// it.
Result<CommitFiles> encode_commit_files(Index index, const StorageMeta& storage);

}  // namespace torch_ckpt
