#pragma once

// The index of a checkpoint, as a load asks it: by the slices that DCP's metadata name.

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

  // The sums of the file that a slice is in. Errors: kCorruption where the index does not know it.
  Result<std::unique_ptr<const FileSums>> sums(const StoredSlice& slice) const;

  // Whether files can be checked by blocks.
  bool has_sums() const { return !index_->is_foreign(); }

  // Whether the index says what is in every slice; otherwise their frames do.
  bool knows_slices() const { return index_->has_entries(); }

  // The tensor in a slice; nothing where only torch can read it.
  // Errors: kCorruption where the index has no such slice.
  Result<std::optional<StoredTensor>> tensor(const StoredSlice& slice);

 private:
  // What was asked of last. Many boxes of one tensor are often wanted, and then sorted.
  struct Asked {
    std::string fqn;
    StoredEntry entry;
    std::vector<std::pair<StoredPlace, int64_t>> boxes;  // Where each lies, and its number.
    bool sorted = false;
  };

  Status turn_to(const StoredSlice& slice);
  std::optional<int64_t> find_box(const StoredPlace& place);

  const std::shared_ptr<const StoredIndex> index_;
  std::optional<Asked> asked_;
  std::string file_name_;  // The file that was asked for last, and its number.
  int64_t file_ = -1;
};

}  // namespace torch_ckpt
