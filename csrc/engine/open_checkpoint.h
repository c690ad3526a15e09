#pragma once

// Opens a checkpoint: `.metadata`, which alone says that there is one, and the index that belongs
// to it. The counterpart of commit.h. Reads the end of the one and the start of the other, however
// long they are.

#include <memory>
#include <string>

#include "base/status.h"
#include "engine/commit.h"
#include "engine/metadata_file.h"
#include "format/stored_index.h"
#include "io/file_system.h"

namespace torch_ckpt {

struct OpenedCheckpoint {
  std::shared_ptr<const MetadataFile> metadata;

  // The index that is sealed to `metadata`; null where there is none.
  std::shared_ptr<const StoredIndex> index;

  // Where `index` is null: one of the usual name that belongs to other metadata, or is damaged. It
  // is for the caller to tell damage from what an older save, or stock DCP, has left behind.
  std::shared_ptr<const StoredIndex> other_index;
  Status index_status;  // Why it cannot be read.
};

// Both files stay open, and what they were, as long as what is returned lives; `fs` outlives it.
// Errors: kNotFound where nothing is committed; kStorage. A damaged index is no error here.
Result<OpenedCheckpoint> open_checkpoint(FileSystem& fs, const std::string& directory,
                                         const CommitNames& names = {});

}  // namespace torch_ckpt
