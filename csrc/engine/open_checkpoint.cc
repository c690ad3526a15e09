#include "engine/open_checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

// Bounds the retries while other processes commit to the same directory.
constexpr int kAttempts = 4;

constexpr int64_t kNamesOfEachIndex = 8;  // More than one: a name itself may be damaged.

Result<std::shared_ptr<const StoredIndex>> open_index(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(auto opened, fs.open(path, OpenMode::kRead, Caching::kBuffered));
  const std::shared_ptr<File> file = std::move(opened);
  ASSIGN_OR_RETURN(const int64_t nbytes, file->size());
  const auto read = [file](int64_t offset, MutableBytes into) { return file->read(offset, into); };
  return StoredIndex::open(read, nbytes, path);
}

// Returns whether storage failed or refused to answer, so that the file may be whole. The other
// codes are those of a bad sector, of a damaged file system, and of what is no file.
bool is_unknown(const Status& status) {
  if (status.code() != StatusCode::kStorage) return false;
  switch (status.error_number()) {
    case EIO:
    case ENODATA:
    case EUCLEAN:
    case EBADMSG:
    case EILSEQ:
    case EISDIR:
    case ENOTDIR:
    case ENXIO:
    case ELOOP:
      return false;
    default:
      return true;
  }
}

bool belongs(const StoredIndex& index, const MetadataFile& metadata) {
  const auto& trailer = metadata.trailer();
  return trailer && index.save_id() == trailer->save_id && index.metadata() == trailer->pickle;
}

// Returns the names that the index of `metadata` may have. Metadata without a trailer was not
// committed with an index, or it is damaged, and its index may be any one in the directory.
std::vector<std::string> index_names(FileSystem& fs, const std::string& directory,
                                     const CommitNames& names, const MetadataFile& metadata) {
  if (const auto& trailer = metadata.trailer()) {
    const std::string& id = trailer->save_id;  // Any bytes, in a stranger's file.
    const bool is_name = id.find('/') == std::string::npos && id.find('\0') == std::string::npos;
    if (!is_name) return {names.index};
    return {names.index_of(id), names.index};
  }
  auto found = fs.list_directory(directory);
  if (!found.ok()) return {names.index};
  std::erase_if(*found, [&](const std::string& name) {
    return name != names.index && !name.starts_with(names.index_of(""));
  });
  return *std::move(found);
}

Result<OpenedCheckpoint> open_once(FileSystem& fs, const std::string& directory,
                                   const CommitNames& names) {
  OpenedCheckpoint opened;
  ASSIGN_OR_RETURN(opened.metadata, MetadataFile::open(fs, directory + "/" + names.metadata));
  const auto fail = [&](const Status& status) {
    Status& first = opened.index_status;
    const bool was_missing = first.code() == StatusCode::kNotFound;
    if (first.ok() || (was_missing && status.code() != StatusCode::kNotFound)) first = status;
  };
  Status unknown;
  for (const std::string& name : index_names(fs, directory, names, *opened.metadata)) {
    const std::string path = str_cat(directory, "/", name);
    const auto index = open_index(fs, path);
    if (!index.ok()) {
      if (is_unknown(index.status())) unknown = index.status();
      fail(index.status());
    } else if (belongs(**index, *opened.metadata)) {
      opened.index = *index;
      opened.index_status = ok_status();
      opened.indexed_files.clear();
      return opened;
    } else {
      fail(corruption(path, " belongs to another save, ", (*index)->save_id()));
      const int64_t count = std::min((*index)->file_count(), kNamesOfEachIndex);
      for (int64_t number = 0; number < count; ++number) {
        if (auto file = (*index)->file(number); file.ok()) {
          opened.indexed_files.push_back(std::move(file->name));
        }
      }
    }
  }
  // Without a trailer, these are probably the indexes of other saves. Some stores refuse to answer
  // for what does not exist.
  if (!unknown.ok() && opened.metadata->trailer()) return unknown;
  return opened;
}

}  // namespace

Result<OpenedCheckpoint> open_checkpoint(FileSystem& fs, const std::string& directory,
                                         const CommitNames& names) {
  ASSIGN_OR_RETURN(OpenedCheckpoint opened, open_once(fs, directory, names));
  // Between the two opens, another save may commit, or the directory may be removed. Then the next
  // attempt finds other metadata, or fails with kNotFound.
  for (int attempt = 0; attempt < kAttempts && !opened.index_status.ok(); ++attempt) {
    ASSIGN_OR_RETURN(OpenedCheckpoint again, open_once(fs, directory, names));
    const bool is_same = again.metadata->trailer() == opened.metadata->trailer() &&
                         again.metadata->nbytes() == opened.metadata->nbytes();
    opened = std::move(again);
    if (is_same) break;
  }
  return opened;
}

}  // namespace torch_ckpt
