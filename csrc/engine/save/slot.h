#pragma once

// Slot: shared memory that holds a snapshot of what one rank saves, and says so itself.
//
// The rank fills it while training stands still. From then on it is the agent's, a process of its
// own, which brings the slots of all ranks to disk (or whoever finds it, when that one is gone) and
// from which a restarted rank loads. A snapshot is a table, of which items there are and where each
// lies, and their bytes: the elements of a tensor one behind the other, an object as it is pickled.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/memory.h"
#include "base/status.h"
#include "engine/save/snapshot.h"
#include "format/slot_header.h"
#include "plan/item.h"
#include "plan/item_extents.h"

namespace torch_ckpt {

// What is known of a snapshot besides its bytes.
struct SlotTable {
  std::string directory;  // Of the checkpoint that it is to become; empty where it is to be none.
  std::string version;    // Of DCP's metadata.
  bool sync = true;       // Whether the checkpoint is to survive a power cut.
  std::vector<std::byte> items;                 // encode(ItemTable): what is in it.
  std::optional<std::vector<std::byte>> paths;  // Where they stood in the nested state dict.
  std::vector<std::byte> extents;               // encode(ItemExtents), from `payload_begin` on.
};

std::vector<std::byte> encode(const SlotTable& table);
Result<SlotTable> decode_slot_table(Bytes bytes);

// A snapshot that was found complete. Views are into the slot.
struct StoredSnapshot {
  SlotHeader header;
  SlotTable table;
  ItemTable items;
  std::vector<ItemExtent> extents;  // One for each item, in order, from the start of the slot.
};

// One process writes a slot, once it has been told that nobody reads it.
class Slot : public Snapshot {
 public:
  // As create_shared_memory and map_shared_memory. kCorruption for less than a page.
  static Result<std::unique_ptr<Slot>> create(const std::string& path, int64_t nbytes);
  static Result<std::unique_ptr<Slot>> open(const std::string& path, bool writable,
                                            bool at_hand = false);

  // Room that a snapshot takes.
  static int64_t needed_nbytes(int64_t table_nbytes, int64_t payload_nbytes);

  // Begins a snapshot: nothing is in the slot before `complete`, and nothing can be copied to it
  // before this. Of `header`, what describes table and payload is found here. kInvalidArgument
  // where it has no room; then nothing has changed.
  Status begin(SlotHeader header, Bytes table, int64_t payload_nbytes);

  // Copies bytes to an offset from `payload_begin`, after all tensors. kInvalidArgument where they
  // reach beyond the payload; then nothing has been copied.
  Status put(int64_t offset, Bytes bytes);

  // All is there. Requires: `begin`.
  void complete();

  void clear();

  // As read_slot_header.
  Result<SlotHeader> header() const;

  // All that is in it but the bytes of its items. Errors: as of `header`, and kCorruption for a
  // table that is damaged or has items which do not lie in it.
  Result<StoredSnapshot> read() const;

 private:
  Slot(Memory memory, std::string path) : Snapshot(std::move(memory), {}), path_(std::move(path)) {}

  const std::string path_;
  SlotHeader header_;  // Of what is being filled.
};

}  // namespace torch_ckpt
