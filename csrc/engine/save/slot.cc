#include "engine/save/slot.h"

#include <algorithm>
#include <utility>

#include "base/xxh3.h"
#include "io/shared_memory.h"
#include "plan/plan_wire.h"
#include "plan/wire.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kMagic = "TCST";
constexpr uint32_t kVersion = 2;
// Its directory is a path, or two with a zero byte between them.
constexpr uint32_t kVersionOfPaths = 1;

constexpr uint8_t kIsSync = 1;
constexpr uint8_t kHasPaths = 2;

void append_counted(WireWriter& writer, Bytes bytes) {
  writer.varint(ssize(bytes));
  writer.append(bytes);
}

bool read_counted(WireReader& reader, std::vector<std::byte>* out) {
  int64_t nbytes;
  Bytes bytes;
  if (!reader.varint(&nbytes) || !reader.bytes(nbytes, &bytes)) return false;
  out->assign(bytes.begin(), bytes.end());
  return true;
}

bool read_table(WireReader& reader, SlotTable* table) {
  uint8_t flags;
  std::string_view directory, version;
  if (!reader.byte(&flags) || !reader.word(&directory) || !reader.word(&version)) return false;
  if ((flags & ~(kIsSync | kHasPaths)) != 0) return false;
  table->sync = (flags & kIsSync) != 0;
  table->directory = directory;
  table->version = version;
  if (!read_counted(reader, &table->items) || !read_counted(reader, &table->extents)) return false;
  if ((flags & kHasPaths) != 0 && !read_counted(reader, &table->paths.emplace())) return false;
  return reader.left() == 0;
}

// Whether there is one extent per item, in order, and all extents lie in the payload.
bool match(const std::vector<ItemExtent>& extents, const ItemTable& items, int64_t payload_nbytes) {
  if (std::ssize(extents) != items.size()) return false;
  for (int64_t i = 0; i < items.size(); ++i) {
    const ItemExtent& extent = extents[static_cast<size_t>(i)];
    if (extent.item != i || !range_within(extent.offset, extent.nbytes, payload_nbytes)) {
      return false;
    }
    // Only plain tensors have a known length; a pickle can have any.
    if (extent.plain && (items.kind(i) == ItemKind::kObject || extent.nbytes != items.nbytes(i))) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::vector<std::byte> encode(const SlotTable& table) {
  WireWriter writer;
  writer.byte((table.sync ? kIsSync : 0) | (table.paths ? kHasPaths : 0));
  writer.word(table.directory);
  writer.word(table.version);
  append_counted(writer, table.items);
  append_counted(writer, table.extents);
  if (table.paths) append_counted(writer, *table.paths);
  return writer.finish(kMagic, kVersion);
}

Result<SlotTable> decode_slot_table(Bytes bytes) {
  const uint32_t version = wire_version(bytes) == kVersionOfPaths ? kVersionOfPaths : kVersion;
  ASSIGN_OR_RETURN(const Bytes body, open_wire(bytes, kMagic, version, "the table of a slot"));
  WireReader reader(body);
  SlotTable table;
  if (!read_table(reader, &table)) {
    return corruption("cannot read the table of a slot: it is truncated or too long");
  }
  return table;
}

Result<std::unique_ptr<Slot>> Slot::create(const std::string& path, int64_t nbytes) {
  if (nbytes < kSlotPage) {
    return invalid_argument("cannot create slot ", path, " of ", nbytes, " bytes: the minimum is ",
                            kSlotPage);
  }
  ASSIGN_OR_RETURN(Memory memory, create_shared_memory(path, nbytes));
  return std::unique_ptr<Slot>(new Slot(std::move(memory), path));
}

Result<std::unique_ptr<Slot>> Slot::open(const std::string& path, bool writable, bool at_hand) {
  ASSIGN_OR_RETURN(Memory memory, map_shared_memory(path, writable, at_hand));
  return std::unique_ptr<Slot>(new Slot(std::move(memory), path));
}

int64_t Slot::needed_nbytes(int64_t table_nbytes, int64_t payload_nbytes) {
  return kSlotPage + align_up(table_nbytes, kSlotPage) + payload_nbytes;
}

Status Slot::begin(SlotHeader header, Bytes table, int64_t payload_nbytes) {
  const int64_t needed = needed_nbytes(ssize(table), payload_nbytes);
  if (needed > ssize(bytes())) {
    return invalid_argument("cannot begin a snapshot of ", needed, " bytes in ", path_,
                            ": the slot has ", ssize(bytes()), " bytes");
  }
  clear();
  header.table_nbytes = ssize(table);
  header.table_sum = xxh3(table);
  header.payload_begin = needed - payload_nbytes;
  header.payload_nbytes = payload_nbytes;
  std::ranges::copy(table, bytes().data() + kSlotPage);
  header_ = header;
  payload_ = slice(bytes(), header.payload_begin, payload_nbytes);
  return ok_status();
}

Status Slot::put(int64_t offset, Bytes from) {
  if (!range_within(offset, ssize(from), ssize(payload_))) {
    return invalid_argument("cannot copy ", ssize(from), " bytes to offset ", offset, " of ", path_,
                            ": the payload has ", ssize(payload_), " bytes");
  }
  std::ranges::copy(from, payload_.data() + offset);
  return ok_status();
}

void Slot::complete() { complete_slot(slice(bytes(), 0, kSlotPage), header_); }

void Slot::clear() { clear_slot(slice(bytes(), 0, kSlotPage)); }

Result<SlotHeader> Slot::header() const {
  return read_slot_header(slice(bytes(), 0, kSlotPage), ssize(bytes()));
}

Result<StoredSnapshot> Slot::read() const {
  StoredSnapshot found;
  ASSIGN_OR_RETURN(found.header, header());
  const Bytes table = slice(bytes(), kSlotPage, found.header.table_nbytes);
  if (xxh3(table) != found.header.table_sum) {
    return corruption("cannot read the snapshot in ", path_, ": its table fails its checksum");
  }
  ASSIGN_OR_RETURN(found.table, decode_slot_table(table));
  ASSIGN_OR_RETURN(found.items, decode(found.table.items));
  ASSIGN_OR_RETURN(found.extents, decode_extents(found.table.extents));
  if (!match(found.extents, found.items, found.header.payload_nbytes)) {
    return corruption("cannot read the snapshot in ", path_,
                      ": its table has items outside the payload");
  }
  for (ItemExtent& extent : found.extents) extent.offset += found.header.payload_begin;
  return found;
}

}  // namespace torch_ckpt
