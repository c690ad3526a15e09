#pragma once

// What a rank reads: the boxes that it wants, cut at the boxes that are stored.
//
// The planner lists what the rank holds (plan/item.h) and the index says what is stored; what they
// have in common is found box by box, of a million shards only those that matter. FastReader gives
// the result to the load job; other readers see DCP's read items.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/stored_index.h"
#include "plan/item.h"

namespace torch_ckpt {

// One read: a box of a stored box, into a box of an item. Or an object, without dimensions.
struct PlannedRead {
  int64_t item = 0;  // Of the table.
  int64_t box = 0;   // Number of the stored box in its entry.
  StoredPlace place;
  bool is_object = false;
  bool is_transformed = false;  // Torch must undo stream transforms.
  Dims box_offsets = {};        // Of the stored box.
  Dims storage_offsets = {};    // In it.
  Dims dest_offsets = {};       // In the item.
  Dims lengths = {};
};

class ReadPlan {
 public:
  // Everything that the items want. Items of FQNs that are not stored are left out where `partial`
  // says so.
  // Errors: kNotFound for an FQN that is not stored; kMismatch for a tensor of other sizes than
  // stored, or an object where a tensor is stored; kInvalidArgument for a box with elements outside
  // of its tensor; those of reading the index.
  static Result<ReadPlan> make(const StoredIndex& index, const ItemTable& items, bool partial);

  const std::vector<PlannedRead>& reads() const { return reads_; }

  // As torch names it; of an item of which something is read.
  const std::string& stored_dtype(int64_t item) const { return dtypes_[static_cast<size_t>(item)]; }
  const std::string& file(int64_t number) const { return files_[static_cast<size_t>(number)]; }

 private:
  std::vector<PlannedRead> reads_;
  std::vector<std::string> dtypes_;
  std::vector<std::string> files_;
};

}  // namespace torch_ckpt
