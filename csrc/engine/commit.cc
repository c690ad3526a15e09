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
  Status status = prepare(fs, what, index, metadata);
  if (status.ok()) status = fs.rename(metadata, path(what.names.metadata));
  if (!status.ok()) {
    // Best effort: what stays is never read, and the next save removes it.
    (void)fs.remove(metadata);
    (void)fs.remove(index);
    return status;
  }
  if (what.sync) RETURN_IF_ERROR(fs.sync_directory(what.directory));
  // Best effort: it is found under its pending name as well, only not as fast.
  (void)fs.rename(index, path(what.names.index));
  return ok_status();
}

}  // namespace torch_ckpt
