#include "engine/commit.h"

#include <cerrno>

namespace torch_ckpt {
namespace {

// Makes the way to a directory durable. Folders that this process may not open are somebody else's,
// and older.
Status sync_folders_above(FileSystem& fs, const std::string& directory) {
  std::string folder = directory;
  for (std::string parent; (parent = parent_directory(folder)) != folder; folder = parent) {
    const Status synced = fs.sync_directory(parent);
    const bool may_not = synced.error_number() == EACCES || synced.error_number() == EPERM;
    if (!synced.ok() && !may_not) return synced;
  }
  return ok_status();
}

Status prepare(FileSystem& fs, const Commit& what, const std::string& index,
               const std::string& metadata) {
  RETURN_IF_ERROR(write_file(fs, index, what.index, what.sync));
  RETURN_IF_ERROR(write_file(fs, metadata, what.metadata, what.sync));
  // The rename may become durable before the entry of a file that was created earlier.
  if (!what.sync) return ok_status();
  RETURN_IF_ERROR(fs.sync_directory(what.directory));
  return sync_folders_above(fs, what.directory);
}

}  // namespace

Status commit(FileSystem& fs, const Commit& what) {
  const auto path = [&](const std::string& name) { return what.directory + "/" + name; };
  const std::string index = path(what.names.pending_index(what.save_id));
  const std::string metadata = path(what.names.pending_metadata(what.save_id));
  // What cannot be removed is never read, and the next save removes it.
  const auto remove_the_rest = [&] {
    (void)fs.remove(index);
    for (const std::string& name : what.data_files) (void)fs.remove(path(name));
  };
  const Status prepared = prepare(fs, what, index, metadata);
  if (!prepared.ok()) {
    (void)fs.remove(metadata);
    remove_the_rest();
    return prepared;
  }
  const Status renamed = fs.rename(metadata, path(what.names.metadata));
  if (!renamed.ok()) {
    // A file server may have renamed it and lost the answer: then the metadata need all the rest.
    if (fs.remove(metadata).ok()) remove_the_rest();
    return renamed;
  }
  if (what.sync) RETURN_IF_ERROR(fs.sync_directory(what.directory));
  // Best effort: it is found under its pending name as well, only not as fast.
  (void)fs.rename(index, path(what.names.index));
  return ok_status();
}

}  // namespace torch_ckpt
