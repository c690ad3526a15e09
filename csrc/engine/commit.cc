#include "engine/commit.h"

namespace torch_ckpt {

Status commit_metadata(FileSystem& fs, const std::string& directory, const std::string& name,
                       Bytes metadata, const std::string& save_id, bool sync) {
  const std::string temporary = str_cat(directory, "/", name, ".", save_id, ".tmp");
  Status status = write_file(fs, temporary, metadata, sync);
  if (status.ok()) status = fs.rename(temporary, directory + "/" + name);
  if (!status.ok()) {
    // Best effort: a temporary that stays is never read.
    (void)fs.remove(temporary);
    return status;
  }
  return sync ? fs.sync_directory(directory) : ok_status();
}

}  // namespace torch_ckpt
