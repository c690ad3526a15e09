#include "engine/open_checkpoint.h"

#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

constexpr int kAttempts = 4;  // Of a directory that others save into.

Result<std::shared_ptr<const StoredIndex>> open_index(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(auto opened, fs.open(path, OpenMode::kRead, Caching::kBuffered));
  const std::shared_ptr<File> file = std::move(opened);
  ASSIGN_OR_RETURN(const int64_t nbytes, file->size());
  const auto read = [file](int64_t offset, MutableBytes into) { return file->read(offset, into); };
  return StoredIndex::open(read, nbytes, path);
}

bool belongs(const StoredIndex& index, const MetadataFile& metadata) {
  const auto& trailer = metadata.trailer();
  return trailer && index.save_id() == trailer->save_id && index.metadata() == trailer->pickle;
}

// The index of these metadata under a pending name: the save that wrote it ended between commit and
// rename. Others are what is left of failed saves, in whatever state.
std::shared_ptr<const StoredIndex> find_pending_index(FileSystem& fs, const std::string& directory,
                                                      const CommitNames& names,
                                                      const MetadataFile& metadata) {
  const Result<std::vector<std::string>> listed = fs.list_directory(directory);
  if (!listed.ok()) return nullptr;
  const std::string prefix = names.pending_index("");
  for (const std::string& name : *listed) {
    if (!name.starts_with(prefix)) continue;
    const auto index = open_index(fs, str_cat(directory, "/", name));
    if (index.ok() && belongs(**index, metadata)) return *index;
  }
  return nullptr;
}

Result<OpenedCheckpoint> open_once(FileSystem& fs, const std::string& directory,
                                   const CommitNames& names) {
  OpenedCheckpoint opened;
  ASSIGN_OR_RETURN(opened.metadata, MetadataFile::open(fs, directory + "/" + names.metadata));
  auto index = open_index(fs, directory + "/" + names.index);
  if (index.ok() && belongs(**index, *opened.metadata)) {
    opened.index = *index;
    return opened;
  }
  if (opened.metadata->trailer()) {
    opened.index = find_pending_index(fs, directory, names, *opened.metadata);
    if (opened.index != nullptr) return opened;
  }
  if (index.status().code() == StatusCode::kNotFound) {
    // It may have been renamed from the pending name while that was looked for.
    index = open_index(fs, directory + "/" + names.index);
    if (index.ok() && belongs(**index, *opened.metadata)) {
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
  // Between the opening of the two, a save may have committed another pair, or the directory may
  // have been removed: then the second attempt finds no metadata either. Only metadata without
  // trailer never had an index.
  const auto should_have_one = [&] {
    return opened.index_status.code() != StatusCode::kNotFound || opened.metadata->trailer();
  };
  for (int attempt = 0; attempt < kAttempts && opened.index == nullptr && should_have_one();
       ++attempt) {
    ASSIGN_OR_RETURN(OpenedCheckpoint again, open_once(fs, directory, names));
    const bool is_same = again.metadata->trailer() == opened.metadata->trailer() &&
                         again.metadata->nbytes() == opened.metadata->nbytes();
    opened = std::move(again);
    if (is_same) break;
  }
  return opened;
}

}  // namespace torch_ckpt
