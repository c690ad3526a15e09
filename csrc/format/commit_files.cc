#include "format/commit_files.h"

#include <utility>

namespace torch_ckpt {

Result<CommitFiles> encode_commit_files(Index index, const StorageMeta& storage) {
  if (!index.has_entries) {
    return invalid_argument("cannot encode metadata from an index without entries");
  }
  if (storage.save_id && *storage.save_id != index.save_id) index.stored_save_id = *storage.save_id;
  CommitFiles out;
  ASSIGN_OR_RETURN(out.metadata, pickle_metadata(index, storage));
  index.metadata = FileDigest::of(out.metadata);
  ASSIGN_OR_RETURN(const auto trailer, write_metadata_trailer({index.save_id, index.metadata}));
  out.metadata.insert(out.metadata.end(), trailer.begin(), trailer.end());
  ASSIGN_OR_RETURN(out.index, write_index(index));
  return out;
}

}  // namespace torch_ckpt
