#pragma once

// The index of a checkpoint, as a load asks it: by file, and by where a slice begins. Made once for
// a load; immutable, so that any thread may use it.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/block_sums.h"
#include "base/status.h"
#include "engine/stored_frames.h"
#include "format/index_file.h"
#include "format/zip_frame.h"

namespace torch_ckpt {

class IndexLookup {
 public:
  explicit IndexLookup(std::shared_ptr<const Index> index);

  // The sums of a file; nullptr where the index does not know it.
  const BlockSums* sums(const std::string& file) const;

  // Whether the index says what is in every slice; otherwise their frames do.
  bool knows_slices() const { return index_->has_entries; }

  // The tensor in a slice; nothing where only torch can read it.
  // Errors: kCorruption where the index has no such slice.
  Result<std::optional<StoredTensor>> tensor(const StoredSlice& slice) const;

 private:
  struct Place {
    const IndexedEntry* entry;
    const IndexedBox* box;
  };
  const std::shared_ptr<const Index> index_;
  std::map<std::string, const IndexedFile*> files_;
  std::map<std::pair<const IndexedFile*, int64_t>, Place> places_;  // By file and offset.
};

}  // namespace torch_ckpt
