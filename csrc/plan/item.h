#pragma once

// What one rank would write: the rank's full plan, before anybody decides who writes what.
//
// A planner lists a hundred thousand items, and the coordinator sees the lists of thousands of
// ranks. So a list is a table of columns, not of objects: FQNs in one run of text, facts that many
// tensors share kept once, boxes in one pool of numbers. plan_wire.h sends it, global_plan.h plans.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "geometry/box.h"
#include "plan/box_view.h"
#include "plan/names.h"

namespace torch_ckpt {

inline constexpr int64_t kMaxNdim = 64;        // Dimensions of a tensor.
inline constexpr int64_t kMaxWordNbytes = 64;  // Of the name of a dtype or of a memory format.

// DCP's WriteItemType: BYTE_IO, TENSOR and SHARD.
enum class ItemKind : uint8_t { kObject, kTensor, kShard };

// What is known of an FQN wherever it is stored. Of an object nothing is: all fields are as here.
struct Facts {
  bool is_tensor = false;
  std::string dtype;  // As torch names it: "bfloat16".
  int64_t itemsize = 0;
  std::string memory_format;  // As torch names it: "contiguous_format".
  bool requires_grad = false;
  bool pin_memory = false;
  bool is_opaque = false;  // Only torch knows how to store it: it is never cut.
  Dims sizes;              // Of the whole tensor, of all ranks.

  bool operator==(const Facts&) const = default;
};

// Whether ranks that say this of an FQN can store parts of one tensor, or the same object. The rest
// only describes what the tensor was, and the first rank's word stands, as in DCP.
inline bool agree(const Facts& a, const Facts& b) {
  return a.is_tensor == b.is_tensor && a.dtype == b.dtype && a.itemsize == b.itemsize &&
         a.sizes == b.sizes;
}

// "bfloat16 (2 bytes an element) of sizes [2, 3], contiguous_format", or "an object".
std::string to_string(const Facts& facts);

// FQNs and their facts, numbered in the order in which they were added. Not for several threads
// while it changes.
class EntryTable {
 public:
  int64_t size() const { return fqns_.size(); }

  // Valid until an entry is added. Requires: 0 <= entry < size().
  std::string_view fqn(int64_t entry) const { return fqns_[entry]; }
  const Facts& facts(int64_t entry) const {
    return facts_[static_cast<size_t>(facts_of_[static_cast<size_t>(entry)])];
  }

  // The number of an FQN, or -1.
  int64_t find(std::string_view fqn) const { return fqns_.find(fqn); }

  // The number of these facts, all different ones being numbered. Requires: they are sound.
  int64_t intern(const Facts& facts);

  // The number of an FQN, which is added with these facts where it is not there: then it is what
  // size() was before.
  int64_t find_or_add(std::string_view fqn, int64_t facts_number);

  // From now on the tensor is opaque. Requires: 0 <= entry < size(), and it is a tensor.
  void mark_opaque(int64_t entry);

  // Makes room for as many entries.
  void reserve(int64_t entries);
  int64_t facts_number(int64_t entry) const { return facts_of_[static_cast<size_t>(entry)]; }

  // All different facts, in order of their numbers, and the bytes of all FQNs.
  const std::vector<Facts>& all_facts() const { return facts_; }
  int64_t fqn_nbytes() const { return fqns_.text_nbytes(); }

 private:
  Names fqns_;
  std::vector<int32_t> facts_of_;
  Names facts_keys_;  // Facts as bytes, to find the same ones again.
  std::vector<Facts> facts_;
};

// Whether facts can be those of a tensor or object: kInvalidArgument with a reason that names
// `fqn`.
Status check_facts(std::string_view fqn, const Facts& facts);

// The items of one rank in plan order. Entries are numbered by their first items.
class ItemTable {
 public:
  // `nbytes`: of the pickled object, as near as the caller knows.
  Status add_object(std::string_view fqn, int64_t nbytes);

  // `kind`: kTensor or kShard. The box may reach beyond the tensor: that is for the coordinator to
  // report, who sees all ranks. An error leaves the table as it was and is kInvalidArgument.
  Status add_tensor(std::string_view fqn, const Facts& facts, ItemKind kind, const Box& box);

  int64_t size() const { return static_cast<int64_t>(entries_of_.size()); }
  const EntryTable& entries() const { return entries_; }

  // Of an item. Requires: 0 <= item < size().
  int64_t entry(int64_t item) const { return entries_of_[static_cast<size_t>(item)]; }
  std::string_view fqn(int64_t item) const { return entries_.fqn(entry(item)); }
  const Facts& facts(int64_t item) const { return entries_.facts(entry(item)); }
  ItemKind kind(int64_t item) const { return kinds_[static_cast<size_t>(item)]; }
  int64_t nbytes(int64_t item) const { return nbytes_[static_cast<size_t>(item)]; }

  // Valid until an item is added; without dimensions for an object.
  BoxView box(int64_t item) const;

 private:
  friend class ItemTableParser;

  void append(int64_t entry, ItemKind kind, const BoxView& box, int64_t nbytes);

  EntryTable entries_;
  std::vector<int32_t> entries_of_;
  std::vector<ItemKind> kinds_;
  std::vector<int64_t> nbytes_;
  std::vector<int64_t> first_dims_;  // Where an item's box begins in `dims_`: offsets, then sizes.
  std::vector<int64_t> dims_;
};

}  // namespace torch_ckpt
