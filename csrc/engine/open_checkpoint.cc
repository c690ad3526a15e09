#include "engine/open_checkpoint.h"

#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

// Bounds the retries while other processes commit to the same directory.
constexpr int kAttempts = 4;

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

// Returns the index of `metadata` that still has its pending name, because its save ended between
// commit and rename. Other pending indexes are leftovers of failed saves and may be damaged.
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
    // Another process may have renamed the pending index after the first open.
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
  // Between the two opens, another save may commit or the directory may be removed. A removed
  // directory makes the next attempt fail with kNotFound. Only metadata without a trailer never had
  // an index.
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
