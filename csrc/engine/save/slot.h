#pragma once

// Slot: shared memory with a snapshot of one rank's items and a header that describes it.
//
// The rank fills the slot while training is stopped. The agent, a separate process, then persists
// the slots of all ranks. If the agent is gone, another process can do so, because the header makes
// the slot self-describing. A restarted rank loads from slots, too.
//
// A snapshot consists of a table and a payload. The table lists the items and the extent of each.
// The payload has the packed elements of each tensor and the pickle of each object.

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

// The description of a snapshot, without its payload.
struct SlotTable {
  std::string directory;                        // Checkpoint to write from this snapshot, or empty.
  std::string version;                          // Version of DCP's metadata.
  bool sync = true;                             // Whether the checkpoint must survive a power cut.
  std::vector<std::byte> items;                 // The items, as encode(ItemTable).
  std::optional<std::vector<std::byte>> paths;  // Their paths in the nested state dict.
  std::vector<std::byte> extents;  // Their extents, relative to `payload_begin`, encoded.
};

std::vector<std::byte> encode(const SlotTable& table);
Result<SlotTable> decode_slot_table(Bytes bytes);

// A complete snapshot in a slot. Views refer to the slot's memory.
struct StoredSnapshot {
  SlotHeader header;
  SlotTable table;
  ItemTable items;
  std::vector<ItemExtent> extents;  // One per item, in order, relative to the start of the slot.
};

// One process writes a slot. Requires: no other process reads the slot at that time.
class Slot : public Snapshot {
 public:
  // See create_shared_memory and map_shared_memory. Errors: those of these functions, and
  // kInvalidArgument to create less than a page.
  static Result<std::unique_ptr<Slot>> create(const std::string& path, int64_t nbytes);
  static Result<std::unique_ptr<Slot>> open(const std::string& path, bool writable,
                                            bool at_hand = false);

  // The slot size that a snapshot requires.
  static int64_t needed_nbytes(int64_t table_nbytes, int64_t payload_nbytes);

  // Begins a snapshot. Call before any copy. The slot counts as empty until `complete`. Sets the
  // table and payload fields of `header`. Errors: kInvalidArgument if the snapshot does not fit;
  // then the slot is unchanged.
  Status begin(SlotHeader header, Bytes table, int64_t payload_nbytes);

  // Copies bytes to an offset relative to `payload_begin`. Call after all tensors are copied.
  // Errors: kInvalidArgument if the bytes exceed the payload; then no byte is copied.
  Status put(int64_t offset, Bytes bytes);

  // Marks the snapshot as complete. Requires: `begin`.
  void complete();

  // Marks the slot as empty.
  void clear();

  // See read_slot_header.
  Result<SlotHeader> header() const;

  // Reads header, table, items and extents, but no payload. Errors: those of `header`; kCorruption
  // for a damaged table, or for an item outside the payload.
  Result<StoredSnapshot> read() const;

 private:
  Slot(Memory memory, std::string path) : Snapshot(std::move(memory), {}), path_(std::move(path)) {}

  const std::string path_;
  SlotHeader header_;  // Header of the snapshot that is being filled.
};

}  // namespace torch_ckpt
