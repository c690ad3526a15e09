#pragma once

// An ItemTable as bytes, which every rank sends to the coordinator.
//
// The body of a frame of wire.h (magic "TCPL", version 1) is
//
//   varint    nbytes of the entries
//   ...       entries: the same bytes on every rank that has the same FQNs and facts, so that the
//             coordinator compares them and parses them once
//   ...       items
//
// Entries:
//   varint    count of different facts, then each:
//     1 byte    bit 0: a tensor, bit 1: requires_grad, bit 2: pin_memory, bit 3: opaque; no other
//               bit; of an object, none and nothing more
//     varint    itemsize
//     2 words   dtype, memory format
//     varint    number of dimensions, then a varint for each: the sizes
//   varint    count of entries, then each:
//     varint    how many bytes the FQN shares with the beginning of the former FQN
//     word      the rest of the FQN
//     varint    number of its facts
//
// The FQNs together are at most kMaxTextGrowth times as long as the bytes of the entries up to the
// end of each, so that few bytes cannot ask for much memory. A writer shares less where they would
// be longer.
//
// Items:
//   varint    count of items, then each:
//     1 byte    bits 0-1: ItemKind
//               bits 2-3: its entry. 0: the first that has had no item yet; 1: that of the former
//                 item; 2: a varint follows, the number of one that has had an item
//               bits 4-7: its box. 0: the whole tensor, or none at all; 1 to 14: partial in this
//                 dimension alone (1 for the first) and whole in all others; 15: a mask follows
//     varint    the number of the entry, where it follows
//     mask      where it follows: a byte for each 8 dimensions or part of them; bit d % 8 of byte
//               d / 8 says that dimension d is partial
//     varints   of an object: its nbytes. Of a tensor: for each partial dimension offset and size
//
// Every entry has an item, and nothing is left over.

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

// The table, or kCorruption, or kUnsupported for another version. Any bytes do; the memory that
// they make it take is in proportion to their length.
Result<ItemTable> decode(Bytes bytes);

// The parts of a frame whose checksum holds; views into it.
struct PlanParts {
  Bytes entries;
  Bytes items;
};
Result<PlanParts> open_plan(Bytes bytes);

// The entries of one rank.
Result<EntryTable> parse_entries(Bytes entries);

// Reads items one by one, for who does not want a table of them.
class ItemStream {
 public:
  // One item; the box is valid until the next is read.
  struct Item {
    int64_t entry = 0;
    ItemKind kind = ItemKind::kObject;
    BoxView box;
    int64_t nbytes = 0;
  };

  // `entries` are those of the same plan, or others, where entry i of the plan has the number
  // `numbers[i]`, with the same kind, itemsize and sizes. They outlive the stream.
  ItemStream(Bytes items, const EntryTable& entries, std::span<const int32_t> numbers);

  // The count of items, to be read first.
  Status begin(int64_t* count);

  // Reads the next item; false where there is none, which `unsound` then tells. Not a Status, as
  // this is done millions of times. Requires: fewer than `count` were read.
  bool next(Item* out);
  Status unsound() const;

  // Whether nothing is left over, after all items were read.
  Status finish() const;

 private:
  bool read_entry(uint8_t form, int64_t* entry);
  bool read_dim(size_t d);
  bool read_box(uint8_t form, const Facts& facts, Item* out);

  WireReader reader_;
  const EntryTable& entries_;
  const std::span<const int32_t> numbers_;
  int64_t read_ = 0;   // Items so far.
  int64_t seen_ = 0;   // Entries that have had an item.
  int64_t last_ = -1;  // The entry of the former item, as the plan numbers it.
  std::array<int64_t, kMaxNdim> offsets_ = {};
  std::array<int64_t, kMaxNdim> sizes_ = {};
};

}  // namespace torch_ckpt
