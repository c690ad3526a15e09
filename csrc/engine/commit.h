#pragma once

// Commit: the step that makes a checkpoint visible. Before the commit, a reader finds the
// checkpoint that was committed to the directory earlier, if any.

#include <span>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "io/file_system.h"

namespace torch_ckpt {

// File names of one checkpoint's metadata and index. Each rank that saves without coordination uses
// different names.
struct CommitNames {
  std::string metadata = ".metadata";
  std::string index = ".index";

  // Name of the index of a save. The trailer of its metadata has the save id, so a reader knows the
  // name. Versions before 0.3.0 renamed the index to `index`, which concurrent saves share.
  std::string index_of(const std::string& save_id) const { return index + "." + save_id; }

  // Name of the metadata before the commit. This file is created, empty, before the first data file
  // of the save. A process that removes it ends the save: the commit renames this file, and never
  // creates it.
  std::string pending_metadata(const std::string& save_id) const {
    return metadata + "." + save_id + ".tmp";
  }
};

struct Commit {
  std::string directory;
  CommitNames names;
  Bytes metadata;
  Bytes index;          // Belongs to `metadata`: states its save id, length and checksum.
  std::string save_id;  // Makes the names of each save unique.
  // The version of the metadata when the save began, which it replaces. For a file system that
  // publishes by condition.
  std::string replaced = {};
  // Names in `directory` of the data files that the metadata refers to. Removed on an error, if the
  // commit certainly did not happen.
  std::span<const std::string> data_files = {};
  // Whether this is a copy of a committed checkpoint. Several processes may commit it at the same
  // time, with the same bytes, and all files remain after an error, since the caller tries again.
  // The pending file is one of them, so garbage collection finds the files if the caller does not.
  bool keeps_files = false;
  // If false, the checkpoint survives a process crash, but a power cut may lose both it and the
  // checkpoint that it replaces.
  bool sync = true;
};

// Publishes metadata and index atomically, replacing the committed ones.
// Requires: the data files are durable, including their directory entries. The metadata's pending
// name is an empty file.
//
//   1. Writes the index, and the metadata under its pending name. Syncs both files, the directory,
//      and the folders above it, since the caller may have created them just before.
//   2. Renames the metadata to its final name, which is the commit. Syncs the directory again.
//
// A file system that publishes by condition gets the index, and then the metadata under its final
// name, if that still has the version `replaced`: the commit. The pending file is then removed.
//
// On an error the former checkpoint stays committed, and the index, data files and metadata of this
// save are removed, the metadata last and only if all data files are. Exception: if the sync in
// step 2 fails, or the rename or the conditional write fails but may have happened, either
// checkpoint may be committed, and no file is removed. The pending file of a conditional write then
// remains, so that a later save finds the files. Errors: kNotFound if another save has removed
// the pending metadata; kStorage, with EEXIST if another one was committed meanwhile.
Status commit(FileSystem& fs, const Commit& what);

// Publishes a new checkpoint by renaming its directory to `to`, which is in the same parent.
//
//   1. Writes index and metadata, the latter under its pending name, and syncs both. Renames the
//      metadata to its final name, so that a file of this name is always complete. Syncs the
//      directory, and the folders above it.
//   2. Renames the directory, which is the commit. Syncs its parent.
//
// On an error in step 1, all files and the directory are removed. If the rename in step 2 fails,
// the data files stay, so that the caller can commit them elsewhere; if it may have happened, so do
// metadata and index. If the last sync fails, the checkpoint may be committed.
// Errors: kNotFound if another save has removed the directory; kStorage.
Status commit_directory(FileSystem& fs, const Commit& what, const std::string& to);

}  // namespace torch_ckpt
