#include "engine/open_checkpoint.h"

#include <utility>

namespace torch_ckpt {
namespace {

Result<std::shared_ptr<const Index>> read_index(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, read_file(fs, path));
  Result<Index> index = parse_index(bytes);
  if (!index.ok()) {
    return Status(index.status().code(),
                  str_cat("cannot read ", path, ": ", index.status().message()));
  }
  return std::shared_ptr<const Index>(std::make_shared<Index>(std::move(*index)));
}

// The index of these metadata under a pending name: the save that wrote it ended between commit and
// rename. Others are what is left of failed saves, in whatever state.
std::shared_ptr<const Index> find_pending_index(FileSystem& fs, const std::string& directory,
                                                const CommitNames& names, const Seal& metadata) {
  const Result<std::vector<std::string>> listed = fs.list_directory(directory);
  if (!listed.ok()) return nullptr;
  const std::string prefix = names.pending_index("");
  for (const std::string& name : *listed) {
    if (!name.starts_with(prefix)) continue;
    const auto index = read_index(fs, directory + "/" + name);
    if (index.ok() && (*index)->metadata == metadata) return *index;
  }
  return nullptr;
}

}  // namespace

Result<OpenedCheckpoint> open_checkpoint(FileSystem& fs, const std::string& directory,
                                         const CommitNames& names) {
  OpenedCheckpoint opened;
  ASSIGN_OR_RETURN(opened.metadata, read_file(fs, directory + "/" + names.metadata));
  const Seal seal = Seal::of(opened.metadata);
  const auto index = read_index(fs, directory + "/" + names.index);
  if (index.ok() && (*index)->metadata == seal) {
    opened.index = *index;
    return opened;
  }
  opened.index = find_pending_index(fs, directory, names, seal);
  if (opened.index != nullptr) return opened;
  opened.index_status = index.status();
  if (index.ok()) opened.other_index = *index;
  return opened;
}

}  // namespace torch_ckpt
