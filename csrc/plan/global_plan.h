#pragma once

// The global plan of a save: which rank writes which items.
//
// The coordinator makes it from the encoded plans of all ranks. It validates the plans, and assigns
// each set of replicas to one rank, or cuts it among several, so that all ranks finish together.
// The result has an Assignment for each rank, and a table of all stored boxes for DCP's Metadata.
// The code scales to a hundred thousand tensors on thousands of ranks.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "plan/assignment.h"
#include "plan/item.h"

namespace torch_ckpt {

struct GlobalPlanOptions {
  int64_t ranks_per_node = 1;
  bool split = true;  // Replicated tensors may be cut among their ranks.
  bool dedup = true;  // Replicas are balanced; otherwise the lowest rank writes each of them.
  bool whole = true;  // The plans cover all ranks of the save: missing elements are an error.
};

// Two ranks that have the same box: the lowest rank of the box, and one with other values.
struct RankPair {
  int32_t lowest = 0;
  int32_t other = 0;

  auto operator<=>(const RankPair&) const = default;
};

// A tensor whose replicas have different values, although FQN, dtype and box are equal.
struct ReplicaDifference {
  std::string fqn;
  std::vector<RankPair> pairs;  // The first few, ascending.
  int64_t pair_count = 0;       // Number of all pairs, of all boxes.
};

// Items [first, first + count) of one rank, whose replicas were equal. Ranks with the same items
// have the same `replica_set`.
struct EqualReplicas {
  int32_t replica_set = 0;
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const EqualReplicas&) const = default;
};

// The boxes that the save stores, by FQN. Entries are in order of first appearance by rank and
// item. The boxes of an entry are ordered by rank, item and row. An object has one box without
// dimensions.
//
// An empty box is not stored if its tensor has elements: DCP finds boxes by offset, and an empty
// box may share its offset with another. Only the first box of an empty tensor is stored.
class StoredTable {
 public:
  const EntryTable& entries() const { return entries_; }

  // Adds an entry with a new FQN and its boxes, in table order. The last `add` is followed by
  // `end`. For callers that have the stored boxes from another source.
  // Requires: `boxes`, `ranks` and `items` have equal lengths.
  void add(std::string_view fqn, const Facts& facts, const std::vector<Box>& boxes,
           const std::vector<int32_t>& ranks, const std::vector<int32_t>& items);
  void end() { first_box_.push_back(box_count()); }

  int64_t box_count() const { return static_cast<int64_t>(ranks_.size()); }

  // The boxes of an entry are [first_box(entry), first_box(entry + 1)).
  // Requires: 0 <= entry <= entries().size().
  int64_t first_box(int64_t entry) const { return first_box_[static_cast<size_t>(entry)]; }

  // The rank that writes a box, and the item number under which the rank reports it.
  // Requires: 0 <= i < box_count().
  int32_t rank(int64_t i) const { return ranks_[static_cast<size_t>(i)]; }
  int32_t item(int64_t i) const { return items_[static_cast<size_t>(i)]; }

  // Returns a view, valid as long as the table. Requires: box i belongs to this entry.
  BoxView box(int64_t entry, int64_t i) const;

 private:
  friend class GlobalPlanner;

  EntryTable entries_;
  std::vector<int64_t> first_box_;
  // Start of each entry in `dims_`, which has offsets, then sizes, per box.
  std::vector<int64_t> first_dim_;
  std::vector<int32_t> ranks_;
  std::vector<int32_t> items_;
  std::vector<int64_t> dims_;
};

class GlobalPlan {
 public:
  // Plans a save. `plans` has the encoded ItemTable of each rank, in rank order. An error names the
  // FQN, ranks and boxes of the first few problems.
  // Errors: kMismatch if ranks disagree on the facts of an FQN; kInvalidArgument if boxes are
  // outside their tensor, overlap, repeat or leave elements missing; kCorruption or kUnsupported if
  // a plan cannot be read.
  //
  // `digests` has the digest of the values of each item of each rank, 8 bytes each; eight zeros if
  // the digest is unknown. A tensor is then cut only if the digests of all its replicas are known
  // and equal. If they are not, all boxes of the tensor are written from one replica: by one rank
  // that has all of them, by the ranks whose items name the same replica (ItemTable::set_replica),
  // or by the k-th rank of each box, for one k. Empty if the values of replicas are not compared.
  static Result<GlobalPlan> make(const std::vector<Bytes>& plans, const GlobalPlanOptions& options,
                                 const std::vector<Bytes>& digests = {});

  // Makes a plan that has only the table of stored boxes.
  static GlobalPlan of(StoredTable stored);

  // 0 for a plan that has only the table of stored boxes.
  int64_t rank_count() const { return static_cast<int64_t>(load_.size()); }

  // Returns the assignment of a rank. Requires: 0 <= rank < rank_count().
  Assignment assignment(int64_t rank) const;

  // Returns the number of bytes that each rank writes.
  const std::vector<int64_t>& load() const { return load_; }

  const StoredTable& stored() const { return stored_; }

  // The tensors whose replicas have different values, in the order of `stored`. Known digests only.
  const std::vector<ReplicaDifference>& differences() const { return differences_; }

  // Returns the items of a rank whose replicas have known and equal values. The items of a replica
  // set are in the same order on all of its ranks. Requires: 0 <= rank < rank_count().
  const std::vector<EqualReplicas>& equal_replicas(int64_t rank) const;

 private:
  friend class GlobalPlanner;

  StoredTable stored_;
  std::vector<int64_t> load_;
  std::vector<std::vector<bool>> written_;  // Per rank and item: whether the rank writes the item.
  std::vector<std::vector<Cut>> cuts_;      // Per rank: cuts in ascending order of items.
  std::vector<ReplicaDifference> differences_;
  std::vector<std::vector<EqualReplicas>> equal_;  // Per distinct plan.
  std::vector<int32_t> plan_of_rank_;
};

}  // namespace torch_ckpt
