#pragma once

// Opens a checkpoint: reads `.metadata`, which alone says that there is one, and finds the index
// that belongs to it. The counterpart of commit.h.

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/commit.h"
#include "format/index_file.h"
#include "io/file_system.h"

namespace torch_ckpt {

struct OpenedCheckpoint {
  std::vector<std::byte> metadata;

  // The index that is sealed to `metadata`; null where there is none.
  std::shared_ptr<const Index> index;

  // Where `index` is null: one of the usual name that belongs to other metadata, or is damaged. It
  // is for the caller to tell damage from what an older save, or stock DCP, has left behind.
  std::shared_ptr<const Index> other_index;
  Status index_status;  // Why it cannot be read.
};

// Errors: kNotFound where nothing is committed; kStorage. A damaged index is no error here.
Result<OpenedCheckpoint> open_checkpoint(FileSystem& fs, const std::string& directory,
                                         const CommitNames& names = {});

}  // namespace torch_ckpt
