#include "engine/open_checkpoint.h"

#include <utility>

namespace torch_ckpt {
namespace {

constexpr int kAttempts = 4;  // Of a directory that others save into.

// Null where it is sealed to other metadata than `only_of`, if that is given.
Result<std::shared_ptr<const Index>> read_index(FileSystem& fs, const std::string& path,
                                                const Seal* only_of = nullptr) {
  // The header says how long it is: a file of another length is not read, however long it claims to
  // be.
  ASSIGN_OR_RETURN(const std::vector<std::byte> header, read_start(fs, path, kIndexHeaderNbytes));
  const Result<IndexIdentity> identity = parse_index_identity(header);
  Result<Index> index = identity.status();
  if (identity.ok()) {
    if (only_of != nullptr && identity->metadata != *only_of) {
      return std::shared_ptr<const Index>();
    }
    ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, read_file(fs, path, identity->nbytes));
    index = parse_index(bytes);
  }
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
    const auto index = read_index(fs, str_cat(directory, "/", name), &metadata);
    if (index.ok() && *index != nullptr) return *index;
  }
  return nullptr;
}

Result<OpenedCheckpoint> open_once(FileSystem& fs, const std::string& directory,
                                   const CommitNames& names) {
  OpenedCheckpoint opened;
  ASSIGN_OR_RETURN(opened.metadata, read_file(fs, directory + "/" + names.metadata));
  const Seal seal = Seal::of(opened.metadata);
  auto index = read_index(fs, directory + "/" + names.index);
  if (index.ok() && (*index)->metadata == seal) {
    opened.index = *index;
    return opened;
  }
  opened.index = find_pending_index(fs, directory, names, seal);
  if (opened.index != nullptr) return opened;
  if (index.status().code() == StatusCode::kNotFound) {
    // It may have been renamed from the pending name while that was looked for.
    index = read_index(fs, directory + "/" + names.index);
    if (index.ok() && (*index)->metadata == seal) {
      opened.index = *index;
      return opened;
    }
  }
  opened.index_status = index.status();
  if (index.ok()) opened.other_index = *index;
  return opened;
}

}  // namespace

Result<OpenedCheckpoint> open_checkpoint(FileSystem& fs, const std::string& directory,
                                         const CommitNames& names) {
  ASSIGN_OR_RETURN(OpenedCheckpoint opened, open_once(fs, directory, names));
  // A save may have committed between the reading of the two: then they are another pair by now.
  for (int attempt = 0; attempt < kAttempts && opened.index == nullptr &&
                        opened.index_status.code() != StatusCode::kNotFound;
       ++attempt) {
    ASSIGN_OR_RETURN(OpenedCheckpoint again, open_once(fs, directory, names));
    if (again.index == nullptr && again.metadata == opened.metadata) break;
    opened = std::move(again);
  }
  return opened;
}

}  // namespace torch_ckpt
