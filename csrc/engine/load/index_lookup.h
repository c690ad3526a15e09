#pragma once

// IndexLookup: finds the tensors of a checkpoint's index by the slices that DCP's metadata lists.
// LoadJob uses it.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/file_sums.h"
#include "engine/load/stored_frames.h"
#include "format/stored_index.h"
#include "format/zip_frame.h"

namespace torch_ckpt {

// Used by one thread at a time.
class IndexLookup {
 public:
  explicit IndexLookup(std::shared_ptr<const StoredIndex> index) : index_(std::move(index)) {}

  // Returns the block checksums of a slice's file. Errors: kCorruption if the index lacks the file.
  Result<std::unique_ptr<const FileSums>> sums(const StoredSlice& slice) const;

  // Whether the index has block checksums.
  bool has_sums() const { return !index_->is_foreign(); }

  // Whether the index describes the tensors of all slices. If not, their frames do.
  bool has_slices() const { return index_->has_entries(); }

  // Returns the tensor in a slice; nullopt if only torch can read it.
  // Errors: kCorruption if the index lacks the slice.
  Result<std::optional<StoredTensor>> tensor(const StoredSlice& slice);

 private:
  // The entry of the last lookup. Consecutive lookups often concern boxes of the same tensor, so
  // the second lookup sorts the boxes.
  struct CachedEntry {
    std::string fqn;
    StoredEntry entry;
    std::vector<std::pair<StoredPlace, int64_t>> boxes;  // Place and number of each box.
    bool sorted = false;
  };

  Status load_entry(const StoredSlice& slice);
  std::optional<int64_t> find_box(const StoredPlace& place);

  const std::shared_ptr<const StoredIndex> index_;
  std::optional<CachedEntry> cached_;
  std::string file_name_;  // File name of the last lookup.
  int64_t file_ = -1;      // Number of this file.
};

}  // namespace torch_ckpt
