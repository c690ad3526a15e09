#pragma once

// ReadPlan: the reads of one rank, which are its wanted boxes cut at the boundaries of stored
// boxes.
//
// The planner lists the rank's items (plan/item.h), and the index lists the stored boxes. The plan
// has one read for each overlap of an item and a stored box. FastReader passes the result to the
// load job; other readers use DCP's read items.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/stored_index.h"
#include "plan/item.h"

namespace torch_ckpt {

// One read from a region of a stored box to a region of an item. An object has no dimensions.
struct PlannedRead {
  int64_t item = 0;  // Item number in the table.
  int64_t box = 0;   // Number of the stored box in its entry.
  StoredPlace place;
  bool is_object = false;
  bool is_transformed = false;  // Torch must undo stream transforms.
  Dims box_offsets = {};        // Offsets of the stored box in the tensor.
  Dims storage_offsets = {};    // Offsets of the region in the stored box.
  Dims dest_offsets = {};       // Offsets of the region in the item.
  Dims lengths = {};            // Sizes of the region.
};

class ReadPlan {
 public:
  // Plans all reads for the items, which read each wanted element exactly once. If several
  // stored boxes are equal, the first one is read. `partial` skips items whose FQNs are not stored.
  // Errors: kNotFound for an FQN that is not stored, unless `partial`; kMismatch if the stored
  // sizes differ, for an object whose FQN is stored as a tensor, or if no stored box has a wanted
  // element; kCorruption if different stored boxes have the same wanted element; kInvalidArgument
  // for a box outside its tensor; those of reading the index.
  static Result<ReadPlan> make(const StoredIndex& index, const ItemTable& items, bool partial);

  const std::vector<PlannedRead>& reads() const { return reads_; }

  // The stored dtype of an item, as torch names it. Requires: the item has a read.
  const std::string& stored_dtype(int64_t item) const { return dtypes_[static_cast<size_t>(item)]; }
  const std::string& file(int64_t number) const { return files_[static_cast<size_t>(number)]; }

 private:
  std::vector<PlannedRead> reads_;
  std::vector<std::string> dtypes_;
  std::vector<std::string> files_;
};

}  // namespace torch_ckpt
