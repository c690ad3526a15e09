#pragma once

// The wire encoding of an ItemTable. Every rank sends its table to the coordinator.
//
// The body is in a frame of wire.h with magic "TCPL" and version 1:
//
//   varint    length of the entries in bytes
//   ...       entries: identical bytes on all ranks with the same FQNs and facts, so the
//             coordinator parses them once
//   ...       items
//
// Entries:
//   varint    number of distinct facts, then for each:
//     1 byte    bit 0: is a tensor, bit 1: requires_grad, bit 2: pin_memory, bit 3: opaque; no
//               other bit is set. An object has 0 here and no further fields
//     varint    itemsize
//     2 words   dtype, memory format
//     varint    number of dimensions, then a varint with the size of each
//   varint    number of entries, then for each:
//     varint    length of the prefix that the FQN shares with the previous FQN
//     word      the rest of the FQN
//     varint    index of its facts
//
// The total length of all FQNs is limited, so that few bytes cannot demand much memory. An entry
// may share a prefix only if the FQNs up to and including its own have at most kMaxTextGrowth times
// the encoded length of the entries before it.
//
// Items:
//   varint    number of items, then for each:
//     1 byte    bits 0-1: ItemKind
//               bits 2-3: entry. 0: the first entry without an item so far; 1: the entry of the
//                 previous item; 2: an earlier entry, whose index follows
//               bits 4-7: box. 0: the whole tensor, or an object; 1 to 14: partial in this one
//                 dimension (1 is the first) and whole in all others; 15: a mask follows
//     varint    entry index, if the tag requires it
//     mask      if the tag requires it: one bit per dimension, padded to whole bytes; bit d % 8 of
//               byte d / 8 is set if dimension d is partial
//     varints   for an object: nbytes. For a tensor: offset and size of each partial dimension
//
// Every entry has at least one item, and no bytes follow the last item.
//
// A table that names replicas has version 2, whose body begins with them. The rest is the body of
// version 1, with identical bytes on all ranks that differ only in their replicas:
//
//   varint    length of the replicas in bytes, then for each run of items, from the first item:
//     varint    number of items; at least 1
//     varint    1 + the replica that the items name; 0 if they name none
//
// The last run names one, and the items after it name none.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "plan/item.h"
#include "plan/wire.h"

namespace torch_ckpt {

inline constexpr int64_t kMaxTextGrowth = 16;

std::vector<std::byte> encode(const ItemTable& table);

// Decodes a table. Accepts arbitrary bytes; memory use is proportional to their number.
// Errors: kCorruption; kUnsupported for another version.
Result<ItemTable> decode(Bytes bytes);

// The sections of a frame with a valid checksum, as views into the frame.
struct PlanSections {
  Bytes replicas;  // Empty in version 1.
  Bytes listed;    // The body of version 1: the other two sections, and the length of the first.
  Bytes entries;
  Bytes items;
};
Result<PlanSections> open_plan(Bytes bytes);

// The items before `end`, and not in an earlier run, name this replica, or kNoReplica.
struct ReplicaRun {
  int64_t end = 0;
  int32_t replica = kNoReplica;
};

// Parses the replicas section of a plan with this number of items. The runs have ascending ends.
Result<std::vector<ReplicaRun>> parse_replicas(Bytes replicas, int64_t item_count);

// Parses the entries section of one rank.
Result<EntryTable> parse_entries(Bytes entries);

// Reads items one by one, without building a table.
class ItemStream {
 public:
  // One item. `box` is valid until the next item is read.
  struct Item {
    int64_t entry = 0;
    ItemKind kind = ItemKind::kObject;
    BoxView box;
    int64_t nbytes = 0;
  };

  // Entry i of the plan corresponds to entry `numbers[i]` of `entries`. Both have the same kind,
  // itemsize and sizes. `entries` and `numbers` outlive the stream.
  ItemStream(Bytes items, const EntryTable& entries, std::span<const int32_t> numbers);

  // Reads the number of items. Must be called first.
  Status begin(int64_t* count);

  // Reads the next item. Returns false on malformed bytes; `unsound` then returns the error. The
  // result is not a Status because this function runs millions of times.
  // Requires: fewer than `count` items were read.
  bool next(Item* out);
  Status unsound() const;

  // Checks that no bytes or entries remain after the last item.
  Status finish() const;

 private:
  bool read_entry(uint8_t form, int64_t* entry);
  bool read_dim(size_t d);
  bool read_box(uint8_t form, const Facts& facts, Item* out);

  WireReader reader_;
  const EntryTable& entries_;
  const std::span<const int32_t> numbers_;
  int64_t read_ = 0;   // Number of items read.
  int64_t seen_ = 0;   // Number of entries with an item so far.
  int64_t last_ = -1;  // Entry of the previous item, by the plan's own numbering.
  std::array<int64_t, kMaxNdim> offsets_ = {};
  std::array<int64_t, kMaxNdim> sizes_ = {};
};

}  // namespace torch_ckpt
