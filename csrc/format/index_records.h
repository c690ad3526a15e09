#pragma once

// The records of `.index` as they lie on disk (FORMAT.md), for index_file.cc and parse_index.cc.
// Little-endian, without padding, at multiples of 8.

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/bytes.h"

namespace torch_ckpt::index_records {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::array<char, 8> kMagic = {'T', 'C', 'K', 'P', 'T', 'I', 'D', 'X'};
inline constexpr uint32_t kVersion = 1;

// The block length of the index's own sums.
inline constexpr int64_t kTableBlockNbytes = int64_t{64} << 10;

// Text that is used again and again is stored once. All uses together stay within this many times
// the file, so that a small file cannot ask for much memory.
inline constexpr int64_t kMaxTextUse = 16;

inline constexpr int64_t kMaxWordNbytes = 64;  // Of a dtype or a memory format.
inline constexpr char kTransformSeparator = '\n';

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
  kTextSection,
  kFileSection,
  kSumSection,  // uint64_t, for every block of every file, in order.
  kEntrySection,
  kBoxSection,
  kDimSection,  // int64_t: of every entry its sizes, then of each of its boxes offsets and sizes.
  kPathSection,
  kKeySection,
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
  Section table;       // uint64_t, for every block of what lies between header and table.
  uint64_t table_sum;  // XXH3 of the table.
  std::array<uint64_t, 4> zeros;
  uint64_t header_sum;  // XXH3 of the header up to here.
};

struct File {
  Text name;
  uint64_t nbytes;
};

enum EntryKind : uint8_t { kObject = 0, kTensor = 1 };
enum EntryFlag : uint8_t { kRequiresGrad = 1, kPinMemory = 2 };

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

static_assert(sizeof(Header) == 256 && sizeof(File) == 16 && sizeof(Entry) == 48 &&
              sizeof(Box) == 32 && sizeof(Path) == 24 && sizeof(Key) == 16);
static_assert(std::is_trivially_copyable_v<Header>);

}  // namespace torch_ckpt::index_records
