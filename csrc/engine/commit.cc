#include "engine/commit.h"

namespace torch_ckpt {
namespace {

Status prepare(FileSystem& fs, const Commit& what, const std::string& index,
               const std::string& metadata) {
  RETURN_IF_ERROR(write_file(fs, index, what.index, what.sync));
  RETURN_IF_ERROR(write_file(fs, metadata, what.metadata, what.sync));
  // The rename may become durable before the entry of a file that was created earlier.
  return what.sync ? fs.sync_directory(what.directory) : ok_status();
}

}  // namespace

Status commit(FileSystem& fs, const Commit& what) {
  const auto path = [&](const std::string& name) { return what.directory + "/" + name; };
  const std::string index = path(what.names.pending_index(what.save_id));
  const std::string metadata = path(what.names.pending_metadata(what.save_id));
  // What cannot be removed is never read, and the next save removes it.
  const Status prepared = prepare(fs, what, index, metadata);
  if (!prepared.ok()) {
    (void)fs.remove(metadata);
    (void)fs.remove(index);
    return prepared;
  }
  const Status renamed = fs.rename(metadata, path(what.names.metadata));
  if (!renamed.ok()) {
    // A file server may have renamed it and lost the answer: then the metadata need their index.
    if (fs.remove(metadata).ok()) (void)fs.remove(index);
    return renamed;
  }
  if (what.sync) RETURN_IF_ERROR(fs.sync_directory(what.directory));
  // Best effort: it is found under its pending name as well, only not as fast.
  (void)fs.rename(index, path(what.names.index));
  return ok_status();
}

}  // namespace torch_ckpt
