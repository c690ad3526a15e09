#pragma once

// The records of `.index` as they lie on disk (FORMAT.md), for whoever writes and reads it.
// Little-endian, without padding, at multiples of 8.

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/bytes.h"

namespace torch_ckpt::index_records {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::array<char, 8> kMagic = {'T', 'C', 'K', 'P', 'T', 'I', 'D', 'X'};
inline constexpr uint32_t kVersion = 2;

// Of an index of files in another format. It is made when they are opened, and never in a file.
inline constexpr uint32_t kForeignVersion = 0x80000000 | kVersion;

// All uses of text together stay within this many times the file, so that a small file cannot ask
// for much memory where all of it is read; and a single text, a word (a dtype, a memory format) and
// the transforms of a box within these lengths, where it is not.
inline constexpr int64_t kMaxTextUse = 16;
inline constexpr int64_t kMaxTextNbytes = int64_t{1} << 20;
inline constexpr int64_t kMaxWordNbytes = 64;
inline constexpr int64_t kMaxTransformsNbytes = 512;
inline constexpr char kTransformSeparator = '\n';

// XXH3 of two names may be the same, but hardly ever of more.
inline constexpr int64_t kMaxSameHash = 16;

// A piece of the text section.
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
  kFileNameSection,  // Name: of every file.
  kEntrySection,
  kEntryNameSection,  // Name: the FQN of every entry.
  kBoxSection,
  kDimSection,  // int64_t: of every entry its sizes, of each of its boxes offsets and sizes; a
                // view.
  kPathSection,
  kKeySection,
  kTextSection,
  kSumSection,  // uint64_t, for every block of every file, in order.
  kSectionCount,
};

enum HeaderFlag : uint32_t { kHasEntries = 1, kHasPaths = 2 };

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t block_nbytes;  // Of the blocks of data files.
  std::array<char, 16> save_id;
  uint64_t metadata_nbytes;
  uint64_t metadata_sum;
  uint32_t flags;
  uint32_t zero;
  Text metadata_version;
  std::array<Section, kSectionCount> sections;
  Section top;                  // uint64_t, for every block of the table.
  Section table;                // uint64_t, for every block of the sections.
  uint64_t top_sum;             // XXH3 of the top.
  std::array<char, 32> unused;  // Zeros; the marks of former versions are skipped.
  std::array<uint64_t, 2> zeros;
  uint64_t header_sum;  // XXH3 of the header up to here.
};

struct File {
  Text name;
  uint64_t nbytes;
  uint64_t first_sum;
};

// Names are in the order of their hashes, so that one is found where its hash lies among all.
struct Name {
  uint64_t hash;    // XXH3 of the name.
  uint32_t number;  // Of the file or entry that bears it.
  uint32_t zero;

  auto operator<=>(const Name&) const = default;
};

enum EntryKind : uint8_t { kObject = 0, kTensor = 1 };
enum EntryFlag : uint8_t { kRequiresGrad = 1, kPinMemory = 2, kHasView = 4 };

// A view: strides, offset of the first element, CRC-32.
inline constexpr int64_t kViewDims = 2;  // Besides the strides.

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

struct Path {
  Text fqn;
  uint64_t first_key;
  uint64_t key_count;
};

enum KeyKind : uint32_t { kTextKey = 0, kIntKey = 1 };

struct Key {
  uint32_t kind;
  uint32_t nbytes;  // Of a text.
  int64_t value;    // The integer, or where the text lies in its section.
};

static_assert(sizeof(Header) == 320 && sizeof(File) == 24 && sizeof(Name) == 16 &&
              sizeof(Entry) == 48 && sizeof(Box) == 32 && sizeof(Path) == 24 && sizeof(Key) == 16);
static_assert(std::is_trivially_copyable_v<Header>);

inline constexpr std::array<uint64_t, kSectionCount> kRecordNbytes = {
    sizeof(File),    sizeof(Name), sizeof(Entry),
    sizeof(Name),    sizeof(Box),  sizeof(int64_t),
    sizeof(Path),    sizeof(Key),  1,
    sizeof(uint64_t)};

}  // namespace torch_ckpt::index_records
