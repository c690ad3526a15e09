#pragma once

// The full item list of one rank, before the coordinator decides which rank writes each item.
//
// A planner lists a hundred thousand items, and the coordinator receives the lists of thousands of
// ranks. A list is therefore a table of columns, not of objects. FQNs share one text buffer, equal
// facts are stored once, and boxes share one pool of numbers. plan_wire.h encodes the table,
// global_plan.h plans with it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "geometry/box.h"
#include "plan/box_view.h"
#include "plan/names.h"

namespace torch_ckpt {

inline constexpr int64_t kMaxNdim = 64;        // Maximum number of tensor dimensions.
inline constexpr int64_t kMaxWordNbytes = 64;  // Maximum length of a dtype or memory format name.
inline constexpr int32_t kNoReplica = -1;

// Same as DCP's WriteItemType: BYTE_IO, TENSOR and SHARD.
enum class ItemKind : uint8_t { kObject, kTensor, kShard };

// The global properties of an FQN, equal on all ranks. An object has the default values.
struct Facts {
  bool is_tensor = false;
  std::string dtype;  // Name in torch: "bfloat16".
  int64_t itemsize = 0;
  std::string memory_format;  // Name in torch: "contiguous_format".
  bool requires_grad = false;
  bool pin_memory = false;
  bool is_opaque = false;  // Only torch can serialize this tensor: never split.
  Dims sizes;              // Global sizes of the tensor.

  bool operator==(const Facts&) const = default;
};

// Returns whether two ranks' facts of one FQN describe the same object or shards of the same
// tensor. The other fields are descriptive: as in DCP, those of the first rank are stored.
inline bool agree(const Facts& a, const Facts& b) {
  return a.is_tensor == b.is_tensor && a.dtype == b.dtype && a.itemsize == b.itemsize &&
         a.sizes == b.sizes;
}

// "bfloat16 (2 bytes an element) of sizes [2, 3], contiguous_format", or "an object".
std::string to_string(const Facts& facts);

// FQNs and their facts, numbered in insertion order. Not thread-safe during changes.
class EntryTable {
 public:
  int64_t size() const { return fqns_.size(); }

  // Valid until an entry is added. Requires: 0 <= entry < size().
  std::string_view fqn(int64_t entry) const { return fqns_[entry]; }
  const Facts& facts(int64_t entry) const {
    return facts_[static_cast<size_t>(facts_of_[static_cast<size_t>(entry)])];
  }

  // Returns the number of an FQN, or -1.
  int64_t find(std::string_view fqn) const { return fqns_.find(fqn); }

  // Returns the number of these facts. Distinct facts have distinct numbers. Requires: check_facts
  // is OK.
  int64_t intern(const Facts& facts);

  // Returns the number of an FQN. A new FQN gets these facts and the number size().
  int64_t find_or_add(std::string_view fqn, int64_t facts_number);

  // Marks a tensor as opaque. Requires: 0 <= entry < size(), and the entry is a tensor.
  void mark_opaque(int64_t entry);

  // Reserves memory for this many entries.
  void reserve(int64_t entries);
  int64_t facts_number(int64_t entry) const { return facts_of_[static_cast<size_t>(entry)]; }

  // All distinct facts by number, and the total length of all FQNs.
  const std::vector<Facts>& all_facts() const { return facts_; }
  int64_t fqn_nbytes() const { return fqns_.text_nbytes(); }

 private:
  Names fqns_;
  std::vector<int32_t> facts_of_;
  Names facts_keys_;  // Maps facts, encoded as bytes, to their numbers.
  std::vector<Facts> facts_;
};

// Checks that facts are valid. kInvalidArgument with a message that names `fqn` otherwise.
Status check_facts(std::string_view fqn, const Facts& facts);

// The items of one rank in plan order. Entries are numbered by first appearance.
class ItemTable {
 public:
  // `nbytes` estimates the size of the pickled object.
  Status add_object(std::string_view fqn, int64_t nbytes);

  // `kind` is kTensor or kShard. The box may reach beyond the tensor: the coordinator checks
  // bounds, since its error can name all ranks.
  // Errors: kInvalidArgument; the table is then unchanged.
  Status add_tensor(std::string_view fqn, const Facts& facts, ItemKind kind, const Box& box);

  // Names the replica that the last item belongs to, by a number that all ranks with boxes of this
  // replica of the tensor use, and no other rank. Not needed if the ranks of each box, in ascending
  // order, number the replicas. Requires: size() > 0, replica >= 0.
  void set_replica(int32_t replica);

  int64_t size() const { return static_cast<int64_t>(entries_of_.size()); }
  const EntryTable& entries() const { return entries_; }
  bool has_replicas() const { return !replicas_.empty(); }

  // Properties of one item. Requires: 0 <= item < size().
  int64_t entry(int64_t item) const { return entries_of_[static_cast<size_t>(item)]; }
  std::string_view fqn(int64_t item) const { return entries_.fqn(entry(item)); }
  const Facts& facts(int64_t item) const { return entries_.facts(entry(item)); }
  ItemKind kind(int64_t item) const { return kinds_[static_cast<size_t>(item)]; }
  int64_t nbytes(int64_t item) const { return nbytes_[static_cast<size_t>(item)]; }

  // Returns kNoReplica if the item's replica has no name.
  int32_t replica(int64_t item) const {
    return item < std::ssize(replicas_) ? replicas_[static_cast<size_t>(item)] : kNoReplica;
  }

  // Returns a view that is valid until the next insertion. An object's box has no dimensions.
  BoxView box(int64_t item) const;

 private:
  friend class ItemTableParser;

  void append(int64_t entry, ItemKind kind, const BoxView& box, int64_t nbytes);

  EntryTable entries_;
  std::vector<int32_t> entries_of_;
  std::vector<ItemKind> kinds_;
  std::vector<int64_t> nbytes_;
  std::vector<int32_t> replicas_;    // Replicas of the first items; later items have none.
  std::vector<int64_t> first_dims_;  // Start of each item's box in `dims_`: offsets, then sizes.
  std::vector<int64_t> dims_;
};

}  // namespace torch_ckpt
