#include "plan/plan_wire.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

namespace torch_ckpt {
namespace {

constexpr std::string_view kPlanMagic = "TCPL";
constexpr uint32_t kPlanVersion = 1;
constexpr uint32_t kVersionWithReplicas = 2;

enum FactsFlag : uint8_t { kIsTensor = 1, kRequiresGrad = 2, kPinMemory = 4, kIsOpaque = 8 };
enum EntryForm : uint8_t { kNextEntry, kFormerEntry, kNumberedEntry };
constexpr uint8_t kWholeBox = 0;
constexpr uint8_t kMaskedBox = 15;

// The checksum is valid, so a faulty or hostile writer produced these bytes.
Status unsound_entries(std::string_view why) {
  return corruption("the entries of a plan are unsound: ", why);
}

Status unsound_replicas() {
  return corruption("the replicas of a plan are unsound: they are cut off or odd");
}

void write_facts(const Facts& facts, WireWriter* out) {
  if (!facts.is_tensor) return out->byte(0);
  out->byte(kIsTensor | (facts.requires_grad ? kRequiresGrad : 0) |
            (facts.pin_memory ? kPinMemory : 0) | (facts.is_opaque ? kIsOpaque : 0));
  out->varint(facts.itemsize);
  out->word(facts.dtype);
  out->word(facts.memory_format);
  out->varint(std::ssize(facts.sizes));
  for (const int64_t size : facts.sizes) out->varint(size);
}

bool read_facts(WireReader* reader, Facts* out) {
  uint8_t flags;
  if (!reader->byte(&flags) || flags > 15) return false;
  if ((flags & kIsTensor) == 0) return flags == 0;
  out->is_tensor = true;
  out->requires_grad = (flags & kRequiresGrad) != 0;
  out->pin_memory = (flags & kPinMemory) != 0;
  out->is_opaque = (flags & kIsOpaque) != 0;
  std::string_view dtype;
  std::string_view memory_format;
  int64_t ndim;
  if (!reader->varint(&out->itemsize) || !reader->word(&dtype) || !reader->word(&memory_format) ||
      !reader->varint(&ndim) || ndim > kMaxNdim) {
    return false;
  }
  out->dtype = dtype;
  out->memory_format = memory_format;
  out->sizes.resize(static_cast<size_t>(ndim));
  return std::all_of(out->sizes.begin(), out->sizes.end(),
                     [reader](int64_t& size) { return reader->varint(&size); });
}

int64_t shared_prefix(std::string_view a, std::string_view b) {
  return std::mismatch(a.begin(), a.begin() + std::ssize(a.substr(0, b.size())), b.begin()).first -
         a.begin();
}

WireWriter write_entries(const EntryTable& entries) {
  WireWriter out;
  out.varint(std::ssize(entries.all_facts()));
  for (const Facts& facts : entries.all_facts()) write_facts(facts, &out);
  out.varint(entries.size());
  std::string_view former;
  int64_t text = 0;
  for (int64_t i = 0; i < entries.size(); ++i) {
    const std::string_view fqn = entries.fqn(i);
    text += std::ssize(fqn);
    const int64_t shared =
        text <= kMaxTextGrowth * out.size() ? shared_prefix(former, fqn) : int64_t{0};
    out.varint(shared);
    out.word(fqn.substr(static_cast<size_t>(shared)));
    out.varint(entries.facts_number(i));
    former = fqn;
  }
  return out;
}

void write_item(const ItemTable& table, int64_t item, int64_t* seen, WireWriter* out) {
  const int64_t entry = table.entry(item);
  const bool is_former = item > 0 && entry == table.entry(item - 1);
  const EntryForm entry_form = entry == *seen ? kNextEntry
                               : is_former    ? kFormerEntry
                                              : kNumberedEntry;
  if (entry == *seen) ++*seen;
  const Dims& sizes = table.facts(item).sizes;
  const BoxView box = table.box(item);
  const auto is_partial = [&](size_t d) { return box.offsets[d] != 0 || box.sizes[d] != sizes[d]; };
  std::array<uint8_t, kMaxNdim / 8> mask = {};
  int64_t partial = 0;
  size_t only = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!is_partial(d)) continue;
    ++partial;
    only = d;
    mask[d / 8] |= static_cast<uint8_t>(1 << d % 8);
  }
  const bool is_masked = partial > 1 || only + 1 >= kMaskedBox;
  const uint8_t box_form = partial == 0 ? kWholeBox
                           : is_masked  ? kMaskedBox
                                        : static_cast<uint8_t>(only + 1);
  out->byte(static_cast<uint8_t>(static_cast<uint8_t>(table.kind(item)) | entry_form << 2 |
                                 box_form << 4));
  if (entry_form == kNumberedEntry) out->varint(entry);
  if (box_form == kMaskedBox) {
    for (size_t i = 0; 8 * i < sizes.size(); ++i) out->byte(mask[i]);
  }
  if (table.kind(item) == ItemKind::kObject) out->varint(table.nbytes(item));
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!is_partial(d)) continue;
    out->varint(box.offsets[d]);
    out->varint(box.sizes[d]);
  }
}

WireWriter write_replicas(const ItemTable& table) {
  WireWriter out;
  for (int64_t begin = 0, end = 0; begin < table.size(); begin = end) {
    const int32_t replica = table.replica(begin);
    while (end < table.size() && table.replica(end) == replica) ++end;
    if (end == table.size() && replica == kNoReplica) break;
    out.varint(end - begin);
    out.varint(int64_t{replica} + 1);
  }
  return out;
}

}  // namespace

std::vector<std::byte> encode(const ItemTable& table) {
  const WireWriter entries = write_entries(table.entries());
  WireWriter out;
  if (table.has_replicas()) {
    const WireWriter replicas = write_replicas(table);
    out.varint(replicas.size());
    out.append(replicas.bytes());
  }
  out.varint(entries.size());
  out.append(entries.bytes());
  out.varint(table.size());
  int64_t seen = 0;
  for (int64_t item = 0; item < table.size(); ++item) write_item(table, item, &seen, &out);
  return out.finish(kPlanMagic, table.has_replicas() ? kVersionWithReplicas : kPlanVersion);
}

Result<PlanSections> open_plan(Bytes bytes) {
  const bool has_replicas = wire_version(bytes) == kVersionWithReplicas;
  const uint32_t version = has_replicas ? kVersionWithReplicas : kPlanVersion;
  ASSIGN_OR_RETURN(const Bytes body, open_wire(bytes, kPlanMagic, version, "a plan"));
  WireReader reader(body);
  int64_t nbytes;
  PlanSections sections;
  if (has_replicas && (!reader.varint(&nbytes) || !reader.bytes(nbytes, &sections.replicas))) {
    return unsound_replicas();
  }
  sections.listed = body.last(static_cast<size_t>(reader.left()));
  if (!reader.varint(&nbytes) || !reader.bytes(nbytes, &sections.entries) ||
      !reader.bytes(reader.left(), &sections.items)) {
    return unsound_entries("they are cut off");
  }
  return sections;
}

Result<std::vector<ReplicaRun>> parse_replicas(Bytes replicas, int64_t item_count) {
  WireReader reader(replicas);
  std::vector<ReplicaRun> runs;
  int64_t end = 0;
  while (reader.left() > 0) {
    int64_t count;
    int64_t replica;
    if (!reader.varint(&count) || count < 1 || count > item_count - end ||
        !reader.varint(&replica) || replica > std::numeric_limits<int32_t>::max()) {
      return unsound_replicas();
    }
    end += count;
    runs.push_back({end, static_cast<int32_t>(replica - 1)});
  }
  if (!runs.empty() && runs.back().replica == kNoReplica) return unsound_replicas();
  return runs;
}

Result<EntryTable> parse_entries(Bytes bytes) {
  WireReader reader(bytes);
  EntryTable out;
  int64_t count;
  if (!reader.varint(&count) || count > reader.left()) return unsound_entries("facts are cut off");
  std::vector<int64_t> facts_numbers(static_cast<size_t>(count));
  for (int64_t& number : facts_numbers) {
    Facts facts;
    if (!read_facts(&reader, &facts)) return unsound_entries("facts are cut off or odd");
    const Status status = check_facts("", facts);
    if (!status.ok()) return unsound_entries("facts cannot be true");
    number = out.intern(facts);
  }
  if (!reader.varint(&count) || count > reader.left()) return unsound_entries("they are cut off");
  out.reserve(count);
  std::string fqn;
  int64_t text = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t before = ssize(bytes) - reader.left();
    int64_t shared;
    std::string_view rest;
    int64_t number;
    if (!reader.varint(&shared) || shared > std::ssize(fqn) || !reader.word(&rest) ||
        !reader.varint(&number) || std::cmp_greater_equal(number, facts_numbers.size())) {
      return unsound_entries("one of them is cut off or odd");
    }
    fqn.resize(static_cast<size_t>(shared));
    fqn += rest;
    text += std::ssize(fqn);
    if (shared > 0 && text > kMaxTextGrowth * before) return unsound_entries("they are too long");
    if (out.find_or_add(fqn, facts_numbers[static_cast<size_t>(number)]) != i) {
      return unsound_entries("an FQN is there twice");
    }
  }
  if (reader.left() != 0) return unsound_entries("bytes are left over");
  return out;
}

ItemStream::ItemStream(Bytes items, const EntryTable& entries, std::span<const int32_t> numbers)
    : reader_(items), entries_(entries), numbers_(numbers) {}

Status ItemStream::unsound() const {
  return corruption("a plan is unsound or cut off at item ", read_);
}

Status ItemStream::begin(int64_t* count) {
  // An item has at least one byte: larger counts are malformed.
  if (!reader_.varint(count) || *count > reader_.left()) return unsound();
  return ok_status();
}

bool ItemStream::read_entry(uint8_t form, int64_t* entry) {
  if (form == kNextEntry) {
    *entry = seen_++;
    return std::cmp_less(*entry, numbers_.size());
  }
  if (form == kFormerEntry) {
    *entry = last_;
    return last_ >= 0;
  }
  return form == kNumberedEntry && reader_.varint(entry) && *entry < seen_;
}

bool ItemStream::read_dim(size_t d) {
  int64_t end;
  return reader_.varint(&offsets_[d]) && reader_.varint(&sizes_[d]) &&
         !__builtin_add_overflow(offsets_[d], sizes_[d], &end);
}

bool ItemStream::read_box(uint8_t form, const Facts& facts, Item* out) {
  const size_t ndim = facts.sizes.size();
  for (size_t d = 0; d < ndim; ++d) {
    offsets_[d] = 0;
    sizes_[d] = facts.sizes[d];
  }
  if (form == kMaskedBox) {
    Bytes mask;
    if (!reader_.bytes((std::ssize(facts.sizes) + 7) / 8, &mask)) return false;
    for (size_t d = 0; d < 8 * mask.size(); ++d) {
      const bool is_partial = (std::to_integer<int>(mask[d / 8]) >> d % 8 & 1) != 0;
      if (is_partial && (d >= ndim || !read_dim(d))) return false;
    }
  } else if (form != kWholeBox && (form > ndim || !read_dim(form - size_t{1}))) {
    return false;
  }
  out->box = {{offsets_.data(), ndim}, {sizes_.data(), ndim}};
  const auto volume = checked_volume(out->box.sizes);
  return volume && !__builtin_mul_overflow(*volume, facts.itemsize, &out->nbytes);
}

bool ItemStream::next(Item* out) {
  ++read_;
  uint8_t tag;
  int64_t entry;
  if (!reader_.byte(&tag) || !read_entry(tag >> 2 & 3, &entry)) return false;
  last_ = entry;
  out->entry = numbers_[static_cast<size_t>(entry)];
  out->kind = static_cast<ItemKind>(tag & 3);
  const Facts& facts = entries_.facts(out->entry);
  const auto form = static_cast<uint8_t>(tag >> 4);
  if (out->kind == ItemKind::kObject) {
    out->box = {};
    return !facts.is_tensor && form == kWholeBox && reader_.varint(&out->nbytes);
  }
  return out->kind <= ItemKind::kShard && facts.is_tensor && read_box(form, facts, out);
}

Status ItemStream::finish() const {
  if (reader_.left() == 0 && std::cmp_equal(seen_, numbers_.size())) return ok_status();
  return corruption("a plan has bytes or entries left over behind ", read_, " items");
}

// Builds an ItemTable from an encoded plan. Friend of ItemTable.
class ItemTableParser {
 public:
  static Result<ItemTable> parse(const PlanSections& sections) {
    ItemTable table;
    ASSIGN_OR_RETURN(table.entries_, parse_entries(sections.entries));
    std::vector<int32_t> numbers(static_cast<size_t>(table.entries_.size()));
    std::iota(numbers.begin(), numbers.end(), 0);
    ItemStream stream(sections.items, table.entries_, numbers);
    int64_t count;
    RETURN_IF_ERROR(stream.begin(&count));
    const auto items = static_cast<size_t>(count);
    table.entries_of_.reserve(items);
    table.kinds_.reserve(items);
    table.nbytes_.reserve(items);
    table.first_dims_.reserve(items);
    ItemStream::Item item;
    for (int64_t i = 0; i < count; ++i) {
      if (!stream.next(&item)) return stream.unsound();
      table.append(item.entry, item.kind, item.box, item.nbytes);
    }
    RETURN_IF_ERROR(stream.finish());
    ASSIGN_OR_RETURN(const auto runs, parse_replicas(sections.replicas, count));
    for (const ReplicaRun& run : runs) {
      table.replicas_.resize(static_cast<size_t>(run.end), run.replica);
    }
    return table;
  }
};

Result<ItemTable> decode(Bytes bytes) {
  ASSIGN_OR_RETURN(const PlanSections sections, open_plan(bytes));
  return ItemTableParser::parse(sections);
}

}  // namespace torch_ckpt
