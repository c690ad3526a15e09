#pragma once

// On-disk records of an index file (FORMAT.md), shared by its writer and its readers. Records are
// little-endian, have no padding, and begin at multiples of 8.

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/bytes.h"

namespace torch_ckpt::index_records {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::array<char, 8> kMagic = {'T', 'C', 'K', 'P', 'T', 'I', 'D', 'X'};
inline constexpr uint32_t kVersion = 2;

// Revision of the code that writes data files. A reader ignores it; `torch-ckpt verify` uses it to
// find checkpoints that a fault of a former writer may have stored wrongly. FORMAT.md lists them.
inline constexpr uint32_t kWriterRevision = 1;

// Version of a foreign index: an index of files in another format, which exists only in memory.
inline constexpr uint32_t kForeignVersion = 0x80000000 | kVersion;

// Limits on text, so that reading a small crafted file cannot allocate much memory. kMaxTextUse
// bounds the total length of all text references, as a multiple of the file's length. The others
// bound one text, one word (dtype or memory format), and the transforms of one box.
inline constexpr int64_t kMaxTextUse = 16;
inline constexpr int64_t kMaxTextNbytes = int64_t{1} << 20;
inline constexpr int64_t kMaxWordNbytes = 64;
inline constexpr int64_t kMaxTransformsNbytes = 512;
inline constexpr char kTransformSeparator = '\n';

// Limit on the number of names with equal hashes. Two such names are rare, more practically
// impossible.
inline constexpr int64_t kMaxSameHash = 16;

// A range of the text section.
struct Text {
  uint32_t offset;
  uint32_t nbytes;
};

struct Section {
  uint64_t offset;
  uint64_t nbytes;
};

enum SectionId {
  kFileSection,
  kFileNameSection,  // One Name per file.
  kEntrySection,
  kEntryNameSection,  // One Name per entry: its FQN.
  kBoxSection,
  // int64_t. For each entry: its sizes; the offsets and sizes of each box; its view, if any.
  kDimSection,
  kPathSection,
  kKeySection,
  kTextSection,
  kSumSection,  // One uint64_t per block of every file, in order.
  kSectionCount,
};

enum HeaderFlag : uint32_t { kHasEntries = 1, kHasPaths = 2, kHasDigests = 4 };

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t block_nbytes;  // Block length of the data files.
  std::array<char, 16> save_id;
  uint64_t metadata_nbytes;
  uint64_t metadata_sum;
  uint32_t flags;
  uint32_t writer_revision;
  Text metadata_version;
  std::array<Section, kSectionCount> sections;
  Section top;       // One uint64_t per block of the table.
  Section table;     // One uint64_t per block of the sections.
  uint64_t top_sum;  // XXH3 of the top.
  // With kHasDigests: one Digest per box, and one Origin per file. Both are at the end of the text
  // section, where readers that do not know them find text that nothing refers to. Without it, the
  // values are undefined.
  Section digests;
  Section origins;
  Text stored_save_id;  // StorageMeta.save_id of the metadata; empty if it equals `save_id`.
  uint64_t zero;
  uint64_t header_sum;  // XXH3 of the header bytes before this field.
};

struct File {
  Text name;
  uint64_t nbytes;
  uint64_t first_sum;
};

// Names are sorted by hash. A reader finds a name by interpolation search on its hash.
struct Name {
  uint64_t hash;    // XXH3 of the name.
  uint32_t number;  // Number of the file or entry with this name.
  uint32_t zero;

  auto operator<=>(const Name&) const = default;
};

enum EntryKind : uint8_t { kObject = 0, kTensor = 1 };
enum EntryFlag : uint8_t { kRequiresGrad = 1, kPinMemory = 2, kHasView = 4 };

// Numbers of a view besides its strides: the offset of the first element, and the CRC-32.
inline constexpr int64_t kViewDims = 2;

struct Entry {
  Text fqn;
  Text dtype;
  Text memory_format;
  uint64_t first_dim;
  uint64_t first_box;
  uint32_t box_count;
  uint16_t ndim;
  uint8_t kind;
  uint8_t flags;
};

enum BoxFlag : uint32_t { kPlain = 1 };

struct Box {
  uint32_t file;
  uint32_t flags;
  uint64_t offset;
  uint64_t nbytes;
  Text transforms;
};

// Digests of the elements of a box (engine/value_digest.h): of a sample and of all. Zeros if they
// are unknown.
struct Digest {
  uint64_t sample = 0;
  uint64_t low = 0;
  uint64_t high = 0;

  bool operator==(const Digest&) const = default;
};

// The id of the save that wrote the file, in binary; 0 if it is that of the index.
using Origin = uint64_t;

struct Path {
  Text fqn;
  uint64_t first_key;
  uint64_t key_count;
};

enum KeyKind : uint32_t { kTextKey = 0, kIntKey = 1 };

struct Key {
  uint32_t kind;
  uint32_t nbytes;  // Length of a text key.
  int64_t value;    // Integer key, or offset of a text key in the text section.
};

static_assert(sizeof(Header) == 320 && sizeof(File) == 24 && sizeof(Name) == 16 &&
              sizeof(Entry) == 48 && sizeof(Box) == 32 && sizeof(Path) == 24 && sizeof(Key) == 16 &&
              sizeof(Digest) == 24);
static_assert(std::is_trivially_copyable_v<Header>);

inline constexpr std::array<uint64_t, kSectionCount> kRecordNbytes = {
    sizeof(File),    sizeof(Name), sizeof(Entry),
    sizeof(Name),    sizeof(Box),  sizeof(int64_t),
    sizeof(Path),    sizeof(Key),  1,
    sizeof(uint64_t)};

}  // namespace torch_ckpt::index_records
