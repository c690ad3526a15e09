#pragma once

// Opens a committed checkpoint: `.metadata`, which marks the commit, and the index that belongs to
// it. The counterpart of commit.h. Reads only the trailer of `.metadata` and the header of the
// index, whatever their sizes.

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/commit.h"
#include "engine/metadata_file.h"
#include "format/stored_index.h"
#include "io/file_system.h"

namespace torch_ckpt {

struct OpenedCheckpoint {
  std::shared_ptr<const MetadataFile> metadata;

  // The index that belongs to `metadata`, or null.
  std::shared_ptr<const StoredIndex> index;

  // If `index` is null: a few data file names from each readable index in the directory. By them,
  // the caller distinguishes damaged metadata from metadata that never had an index.
  std::vector<std::string> indexed_files;
  Status index_status;  // Why `index` is null.
};

// Both files stay open, with unchanged contents, for the lifetime of the result.
// Requires: `fs` outlives the result.
// Errors: kNotFound if no checkpoint is committed; kStorage if a file cannot be read now. A damaged
// index is not an error here.
Result<OpenedCheckpoint> open_checkpoint(FileSystem& fs, const std::string& directory,
                                         const CommitNames& names = {});

}  // namespace torch_ckpt
