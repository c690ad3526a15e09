#pragma once

// Commit: the one step that makes a checkpoint visible. Before it there is no new checkpoint, and
// whatever was committed in the directory before is still what a reader finds.

#include <span>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "io/file_system.h"

namespace torch_ckpt {

// The names of one checkpoint's metadata and index. Ranks that save without coordination have names
// of their own.
struct CommitNames {
  std::string metadata = ".metadata";
  std::string index = ".index";

  // An index that is complete but has not come to its usual name yet, and one that never will
  // because its save failed.
  std::string pending_index(const std::string& save_id) const { return index + "." + save_id; }

  // `.metadata` that is not committed yet, or never was.
  std::string pending_metadata(const std::string& save_id) const {
    return metadata + "." + save_id + ".tmp";
  }
};

struct Commit {
  std::string directory;
  CommitNames names;
  Bytes metadata;
  Bytes index;          // Sealed to `metadata`.
  std::string save_id;  // Keeps what different saves write apart.
  // Names in `directory` of what the metadata refer to, removed if they are certainly not
  // committed.
  std::span<const std::string> data_files = {};
  bool sync = true;  // Without, the end of the process cannot harm it, but a power cut may lose
                     // both it and what it replaces.
};

// Publishes metadata and index, in place of those that were there, in one step. The data files that
// they refer to are durable, entries of the directory included, before this is called.
//
//   1. The index is written under its pending name and the metadata under theirs. Both are synced.
//      Then the directory is, and so are those above it: somebody may have made them just before.
//   2. The metadata is renamed to its usual name: the commit. The directory is synced again.
//   3. The index is renamed to its usual name. A reader finds it under either.
//
// On an error the former checkpoint is still in place and what was written is removed, data files
// included, except that after a failed sync of the directory in 2, or a rename that may have been
// done all the same, either checkpoint may be found: then nothing is removed.
Status commit(FileSystem& fs, const Commit& what);

}  // namespace torch_ckpt
