#pragma once

// The plan of a save: from what every rank would write to what each one does write.
//
// The coordinator makes it from the encoded plans of all ranks. It is checked, replicas are given
// to one rank each (or cut among several) so that all finish together, and the result is known in
// two ways: for each rank an Assignment to send to it, and for DCP's Metadata a table of the boxes
// that will be stored. Made for a hundred thousand tensors on thousands of ranks.

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "plan/assignment.h"
#include "plan/item.h"

namespace torch_ckpt {

struct GlobalPlanOptions {
  int64_t ranks_per_node = 1;
  bool split = true;  // Whether a tensor that several ranks hold may be cut among them.
  bool dedup = true;  // Whether replicas are balanced; else the lowest rank of each writes it.
  bool whole = true;  // Whether they are all that save: then what nobody holds is a hole.
};

// The boxes that will be stored, by FQN: entries in order of first appearance by rank and item, the
// boxes of each by the rank and the item that they come from, then by rows. An object has one box,
// without dimensions.
//
// A box without elements is not stored where its tensor has elements: DCP finds boxes by their
// offsets, which it may share with another. Of a tensor without elements, only the first box is.
class StoredTable {
 public:
  const EntryTable& entries() const { return entries_; }

  // The boxes of one more entry, which must be of another FQN, in the same order; to be followed by
  // `end`. For who knows from elsewhere what is stored. Requires: as many ranks and items as boxes.
  void add(std::string_view fqn, const Facts& facts, const std::vector<Box>& boxes,
           const std::vector<int32_t>& ranks, const std::vector<int32_t>& items);
  void end() { first_box_.push_back(box_count()); }

  int64_t box_count() const { return static_cast<int64_t>(ranks_.size()); }

  // The boxes of an entry are [first_box(entry), first_box(entry + 1)).
  // Requires: 0 <= entry <= entries().size().
  int64_t first_box(int64_t entry) const { return first_box_[static_cast<size_t>(entry)]; }

  // Which rank writes a box, and which of its items it reports it as. Requires: 0 <= i <
  // box_count().
  int32_t rank(int64_t i) const { return ranks_[static_cast<size_t>(i)]; }
  int32_t item(int64_t i) const { return items_[static_cast<size_t>(i)]; }

  // Valid as long as the table. Requires: the box is one of this entry.
  BoxView box(int64_t entry, int64_t i) const;

 private:
  friend class GlobalPlanner;

  EntryTable entries_;
  std::vector<int64_t> first_box_;
  std::vector<int64_t> first_dim_;  // Of each entry, in `dims_`: of each box offsets, then sizes.
  std::vector<int32_t> ranks_;
  std::vector<int32_t> items_;
  std::vector<int64_t> dims_;
};

class GlobalPlan {
 public:
  // Plans a save of ranks that have sent these (encode(ItemTable), in rank order). An error names
  // FQN, ranks and boxes of the first few problems: kMismatch where ranks disagree on what an FQN
  // is, kInvalidArgument where boxes lie outside, overlap, are there twice or leave a hole,
  // kCorruption and kUnsupported where a plan cannot be read.
  static Result<GlobalPlan> make(const std::vector<Bytes>& plans, const GlobalPlanOptions& options);

  // A plan of which only `stored` is known.
  static GlobalPlan of(StoredTable stored);

  // 0 if only `stored` is known.
  int64_t rank_count() const { return static_cast<int64_t>(load_.size()); }

  // What a rank is to write. Requires: 0 <= rank < rank_count().
  Assignment assignment(int64_t rank) const;

  // Bytes that each rank writes.
  const std::vector<int64_t>& load() const { return load_; }

  const StoredTable& stored() const { return stored_; }

 private:
  friend class GlobalPlanner;

  StoredTable stored_;
  std::vector<int64_t> load_;
  std::vector<std::vector<bool>> written_;  // Of each rank, whether it writes each of its items.
  std::vector<std::vector<Cut>> cuts_;      // Of each rank, ascending by item.
};

}  // namespace torch_ckpt
