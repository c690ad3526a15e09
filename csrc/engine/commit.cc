#include "engine/commit.h"

#include <cerrno>

namespace torch_ckpt {
namespace {

// Syncs all folders above a directory. Folders that this process may not open are skipped: another
// user owns them, and they existed before.
Status sync_folders_above(FileSystem& fs, const std::string& directory) {
  std::string folder = directory;
  for (std::string parent; (parent = parent_directory(folder)) != folder; folder = parent) {
    const Status synced = fs.sync_directory(parent);
    const bool may_not = synced.error_number() == EACCES || synced.error_number() == EPERM;
    if (!synced.ok() && !may_not) return synced;
  }
  return ok_status();
}

bool is_gone(const Status& removed) {
  return removed.ok() || removed.code() == StatusCode::kNotFound;
}

// Another process that commits the same copy may have written the same index.
Status write_index(FileSystem& fs, const Commit& what, const std::string& path) {
  const Status created = write_file(fs, path, what.index, what.sync);
  if (!what.keeps_files || created.error_number() != EEXIST) return created;
  return write_file(fs, path, what.index, what.sync, OpenMode::kUpdate);
}

// Writes and syncs both files.
Status write_files(FileSystem& fs, const Commit& what, const std::string& index,
                   const std::string& metadata, OpenMode metadata_mode) {
  RETURN_IF_ERROR(write_index(fs, what, index));
  return write_file(fs, metadata, what.metadata, what.sync, metadata_mode);
}

// Otherwise the commit may become durable before the entry of a file that was created earlier.
Status sync_entries(FileSystem& fs, const Commit& what) {
  if (!what.sync) return ok_status();
  RETURN_IF_ERROR(fs.sync_directory(what.directory));
  return sync_folders_above(fs, what.directory);
}

}  // namespace

Status commit(FileSystem& fs, const Commit& what) {
  const auto path = [&](const std::string& name) { return what.directory + "/" + name; };
  const std::string index = path(what.names.index_of(what.save_id));
  const std::string metadata = path(what.names.pending_metadata(what.save_id));
  // Best effort: readers ignore these files without a commit, and the next save removes them. An
  // index without its pending metadata would be taken for one whose metadata was lost. Data files
  // without pending metadata are never removed later: a user may have copied them there. Returns
  // whether all data files were removed.
  const auto remove_index_and_data = [&] {
    if (what.keeps_files) return false;
    (void)fs.remove(index);
    bool are_removed = true;
    for (const std::string& name : what.data_files) are_removed &= is_gone(fs.remove(path(name)));
    return are_removed;
  };
  if (fs.traits().publishes_by_condition) {
    Status status = write_index(fs, what, index);
    const bool has_index = status.ok();
    if (has_index) status = fs.publish(path(what.names.metadata), what.metadata, what.replaced);
    if (!status.ok()) {
      // Only a failed condition proves that nothing was published.
      if (has_index && status.error_number() != EEXIST) return status;
      if (!remove_index_and_data()) return status;
    }
    (void)fs.remove(metadata);
    return status;
  }
  const auto prepare = [&]() -> Status {
    RETURN_IF_ERROR(write_files(fs, what, index, metadata, OpenMode::kUpdate));
    return sync_entries(fs, what);
  };
  const Status prepared = prepare();
  if (!prepared.ok()) {
    if (remove_index_and_data()) (void)fs.remove(metadata);
    return prepared;
  }
  const Status renamed = fs.rename(metadata, path(what.names.metadata));
  if (!renamed.ok()) {
    if (what.keeps_files) return renamed;
    // A file server may have renamed the file and lost the reply. Then the metadata is committed,
    // and needs the index and the data files. So the index stays longer than its pending file. If
    // the process is killed in between, readers of a directory without a checkpoint report lost
    // metadata, until the next save.
    if (fs.remove(metadata).ok()) (void)remove_index_and_data();
    return renamed;
  }
  return what.sync ? fs.sync_directory(what.directory) : ok_status();
}

Status commit_directory(FileSystem& fs, const Commit& what, const std::string& to) {
  const auto path = [&](const std::string& name) { return what.directory + "/" + name; };
  const std::string index = path(what.names.index_of(what.save_id));
  const std::string pending = path(what.names.pending_metadata(what.save_id));
  const std::string metadata = path(what.names.metadata);
  const auto prepare = [&]() -> Status {
    RETURN_IF_ERROR(write_files(fs, what, index, pending, OpenMode::kCreate));
    RETURN_IF_ERROR(fs.rename(pending, metadata));
    return sync_entries(fs, what);
  };
  const Status prepared = prepare();
  if (!prepared.ok()) {
    for (const std::string& name : {metadata, pending, index}) (void)fs.remove(name);
    for (const std::string& name : what.data_files) (void)fs.remove(path(name));
    (void)fs.remove(what.directory);
    return prepared;
  }
  const Status renamed = fs.rename(what.directory, to);
  if (!renamed.ok()) {
    // As above: the directory may have its new name.
    if (fs.remove(metadata).ok()) (void)fs.remove(index);
    return renamed;
  }
  return what.sync ? fs.sync_directory(parent_directory(to)) : ok_status();
}

}  // namespace torch_ckpt
