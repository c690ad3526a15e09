#pragma once

// Commit: the one step that makes a checkpoint visible. Before it there is no new checkpoint, and
// whatever was committed in the directory before is still what a reader finds.

#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "io/file_system.h"

namespace torch_ckpt {

// Publishes `metadata` as `name` (".metadata") in `directory`, replacing what was there in one
// step: a temporary file, synced; a rename; a sync of the directory. With `sync` false it is as
// atomic, but a power cut may undo it. `save_id` keeps temporaries of different saves apart.
//
// On an error the former metadata is still in place, except that after a failed sync of the
// directory either may be found. The temporary is removed.
Status commit_metadata(FileSystem& fs, const std::string& directory, const std::string& name,
                       Bytes metadata, const std::string& save_id, bool sync);

}  // namespace torch_ckpt
