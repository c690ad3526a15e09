// Looking things up in an index without reading it: what is read, what is checked, and that hostile
// bytes are refused by whoever comes across them.

#include "format/stored_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "support/index_sums.h"
#include "support/opened_index.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::stored_index_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace records = index_records;

constexpr int64_t kBlock = CheckedBlocks::kBlockNbytes;
constexpr int64_t kSliceNbytes = 1000;

std::string fqn_of(int64_t i) { return "model.layers." + std::to_string(i) + ".weight"; }

// `entries` tensors of two dimensions in `boxes` boxes each, box i of every tensor in file i.
Index large_index(int64_t entries, int64_t boxes) {
  Index index;
  index.save_id = "0123456789abcdef";
  index.has_entries = true;
  index.version = "1.0.0";
  for (int64_t f = 0; f < boxes; ++f) {
    IndexedFile file;
    file.name = "__" + std::to_string(f) + "_0.distcp";
    file.sums.file_nbytes = entries * kSliceNbytes;
    const int64_t blocks = BlockGrid::block_count(file.sums.file_nbytes, kSumBlockNbytes);
    for (int64_t k = 0; k < blocks; ++k) {
      file.sums.sums.push_back(static_cast<uint64_t>(f * 100000 + k));
    }
    index.files.push_back(std::move(file));
  }
  for (int64_t i = 0; i < entries; ++i) {
    IndexedEntry entry{.fqn = fqn_of(i),
                       .is_tensor = true,
                       .dtype = "bfloat16",
                       .memory_format = "contiguous_format",
                       .sizes = {4 * boxes, 6}};
    for (int64_t b = 0; b < boxes; ++b) {
      entry.boxes.push_back({{4 * b, 0}, {4, 6}, b, i * kSliceNbytes, kSliceNbytes, true, {}});
    }
    index.entries.push_back(std::move(entry));
  }
  return index;
}

// What was asked of an index, as far as it was answered.
Result<IndexedEntry> looked_up(const StoredIndex& index, const std::string& fqn) {
  ASSIGN_OR_RETURN(const auto number, index.find_entry(fqn));
  if (!number) return errno_status(ENOENT, fqn);
  ASSIGN_OR_RETURN(StoredEntry entry, index.entry(*number));
  ASSIGN_OR_RETURN(entry.facts.boxes, index.boxes(entry, 0, entry.box_count));
  return entry.facts;
}

TEST(StoredIndexTest, EveryNameIsFoundAndNoOther) {
  for (const int64_t entries : {0, 1, 2, 3, 1000}) {
    const Index index = large_index(entries, 2);
    const auto stored = opened(index);
    for (int64_t i = 0; i < entries; ++i) {
      ASSERT_OK_AND_ASSIGN(const IndexedEntry found, looked_up(*stored, fqn_of(i)));
      ASSERT_EQ(found, index.entries[static_cast<size_t>(i)]);
      EXPECT_EQ(*stored->find_entry(fqn_of(i) + "x"), std::nullopt);
      EXPECT_EQ(*stored->find_entry(fqn_of(i + entries)), std::nullopt);
    }
    EXPECT_EQ(*stored->find_entry(""), std::nullopt);
    EXPECT_EQ(*stored->find_file("__1_0.distcp"), 1);
    EXPECT_EQ(*stored->find_file("__2_0.distcp"), std::nullopt);
  }
}

TEST(StoredIndexTest, OnlyAnIndexInMemoryHasItsBytesAtHand) {
  const std::vector<std::byte> bytes = written(large_index(3, 2));
  ASSERT_OK_AND_ASSIGN(const auto in_memory, StoredIndex::in_memory(bytes));
  EXPECT_EQ(in_memory->memory().data(), bytes.data());
  EXPECT_EQ(in_memory->memory().size(), bytes.size());
  ASSERT_OK_AND_ASSIGN(const auto in_file, opened(bytes));
  EXPECT_TRUE(in_file->memory().empty());
}

TEST(StoredIndexTest, OpeningReadsTheStartAloneAndANameAFewBlocks) {
  const Index index = large_index(50000, 2);
  const std::vector<std::byte> bytes = written(index);
  ASSERT_GT(ssize(bytes), 100 * kBlock);
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto log = std::make_shared<ReadLog>();
    ASSERT_OK_AND_ASSIGN(const auto stored, opened(bytes, log));
    EXPECT_EQ(log->reads, 1);
    EXPECT_LE(log->nbytes, kBlock);
    const int64_t i = pick(random, 50000);
    ASSERT_OK_AND_ASSIGN(const IndexedEntry found, looked_up(*stored, fqn_of(i)));
    EXPECT_EQ(found, index.entries[static_cast<size_t>(i)]);
    // Of names two or three; then one of entries, texts, boxes, dims and files, or two at an edge.
    EXPECT_LE(log->reads, 16) << "seed " << seed;
    EXPECT_LE(log->nbytes, 16 * kBlock);
    const int64_t before = log->reads;
    ASSERT_OK(looked_up(*stored, fqn_of(i)).status());
    EXPECT_EQ(log->reads, before) << "what was read is kept";
  }
}

TEST(StoredIndexTest, WhatIsKeptIsBounded) {
  const Index index = large_index(1, 1);
  std::vector<std::byte> body = random_bytes(100 * kBlock + 17, 1);
  BlockSummer summer(kBlock);
  summer.append(body);
  const BlockSums sums = summer.finish();
  const Bytes table = std::as_bytes(std::span(sums.sums));
  const uint64_t top = xxh3(table);
  int64_t reads = 0;
  const int64_t nbytes = ssize(body);
  const CheckedBlocks blocks(
      [&](int64_t offset, MutableBytes into) {
        ++reads;
        const Bytes from = offset >= nbytes + ssize(table) ? std::as_bytes(std::span(&top, 1))
                           : offset >= nbytes ? table.subspan(static_cast<size_t>(offset - nbytes))
                                              : Bytes(body).subspan(static_cast<size_t>(offset));
        std::copy_n(from.begin(), into.size(), into.begin());
        return ok_status();
      },
      {.body = {0, nbytes},
       .table = {nbytes, ssize(table)},
       .top = {nbytes + ssize(table), 8},
       .top_sum = xxh3(std::as_bytes(std::span(&top, 1)))},
      8 * kBlock, "f");
  for (int round = 0; round < 2; ++round) {
    for (int64_t at = 0; at < nbytes; at += kBlock / 2) {
      std::byte byte;
      ASSERT_OK(blocks.read(at, {&byte, 1}));
      EXPECT_EQ(byte, body[static_cast<size_t>(at)]);
    }
  }
  EXPECT_EQ(reads, 2 * 101 + 2);
  std::vector<std::byte> all(body.size());
  ASSERT_OK(blocks.read(0, all));
  EXPECT_TRUE(all == body);
}

TEST(StoredIndexTest, BoxesAreFoundByTheirOffsetsAndByWhatTheyShare) {
  const Index index = large_index(3, 3000);
  const auto stored = opened(index);
  ASSERT_OK_AND_ASSIGN(const StoredEntry entry, stored->entry(1));
  for (const int64_t b : {0, 1, 1023, 1024, 2999}) {
    for (const std::optional<int64_t> guess : {std::optional<int64_t>(), {b}, {0}, {-1}, {3000}}) {
      EXPECT_EQ(*stored->find_box(entry, {4 * b, 0}, guess), b);
      EXPECT_EQ(*stored->find_box(entry, {4 * b + 1, 0}, guess), std::nullopt);
    }
    EXPECT_THAT(*stored->overlapping(entry, {4 * b, 0}, {4, 1}), ElementsAre(b));
    EXPECT_THAT(*stored->overlapping(entry, {4 * b, 0}, {0, 1}), IsEmpty());
  }
  EXPECT_THAT(*stored->overlapping(entry, {4 * 7 + 3, 5}, {6, 1}), ElementsAre(7, 8, 9));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(std::ssize(*stored->overlapping(entry, {0, 0}, {kMost, kMost})), 3000);
  EXPECT_CODE(stored->overlapping(entry, {0}, {1}), StatusCode::kMismatch);
  EXPECT_EQ(*stored->find_box(entry, {0}, 0), std::nullopt);
}

TEST(StoredIndexTest, AnEmptyBoxDoesNotHideAnotherOneAtItsOffsets) {
  Index index = large_index(3, 4);
  std::vector<IndexedBox>& boxes = index.entries[1].boxes;
  boxes[0].offsets = boxes[3].offsets = boxes[2].offsets;
  boxes[0].sizes = boxes[3].sizes = Dims(boxes[2].sizes.size());
  const Dims at = boxes[2].offsets;
  const auto stored = opened(index);
  ASSERT_OK_AND_ASSIGN(const StoredEntry entry, stored->entry(1));
  for (const std::optional<int64_t> guess : {std::optional<int64_t>(), {0}, {1}, {2}, {3}}) {
    EXPECT_EQ(*stored->find_box(entry, at, guess), 2);
  }
}

TEST(StoredIndexTest, SumsOfAnyPartOfAFileComeBack) {
  const Index index = large_index(2000, 3);
  const auto stored = opened(index);
  for (int64_t f = 0; f < 3; ++f) {
    const auto& all = index.files[static_cast<size_t>(f)].sums.sums;
    ASSERT_OK_AND_ASSIGN(const StoredFile file, stored->file(f));
    ASSERT_OK_AND_ASSIGN(const auto part, stored->sums(file, 5, std::ssize(all)));
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + 5, all.end()));
  }
}

TEST(StoredIndexTest, AllThatWasWrittenIsListed) {
  Index index = large_index(500, 3);
  EXPECT_EQ(*opened(index)->stored_save_id(), index.save_id);
  index.stored_save_id = "1b4e28ba-2fa1-4d2b-883f-0016d3cca427";
  const auto stored = opened(index);
  EXPECT_EQ(*stored->stored_save_id(), index.stored_save_id);
  ASSERT_OK_AND_ASSIGN(const Index all, stored->read_all());
  EXPECT_EQ(all, index);
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> fqns, stored->fqns());
  ASSERT_EQ(fqns.size(), 500u);
  EXPECT_EQ(fqns[7], fqn_of(7));
  EXPECT_EQ(*stored->version(), "1.0.0");
  EXPECT_OK(stored->check());
}

// Whatever is damaged, what is looked up is right or refused; what is sound elsewhere is found.
TEST(StoredIndexTest, DamageToAnyBlockIsFoundWhenItIsUsed) {
  const Index index = large_index(20000, 2);
  const std::vector<std::byte> bytes = written(index);
  records::Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  int refused = 0;
  int untouched = 0;
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    // In each section as often as in any other, and in the sums of the index itself.
    records::Section in = {0, bytes.size()};
    const auto section = static_cast<size_t>(pick(random, records::kSectionCount + 3));
    if (section < records::kSectionCount) in = header.sections[section];
    if (section == records::kSectionCount) in = header.table;
    if (section == records::kSectionCount + 1) in = header.top;
    if (in.nbytes == 0) continue;
    const size_t at =
        in.offset + static_cast<size_t>(pick(random, static_cast<int64_t>(in.nbytes)));
    std::vector<std::byte> damaged = bytes;
    damaged[at] ^= std::byte{1} << static_cast<int>(pick(random, 8));
    const auto stored = opened(damaged);
    if (!stored.ok()) {
      EXPECT_LT(at, sizeof(header));
      EXPECT_CODE(stored, StatusCode::kCorruption);
      continue;
    }
    ASSERT_OK_AND_ASSIGN(const std::vector<Region> damage, (*stored)->damage());
    ASSERT_FALSE(damage.empty());
    EXPECT_CODE((*stored)->check(), StatusCode::kCorruption);
    EXPECT_CODE((*stored)->read_all(), StatusCode::kCorruption);
    if (at >= header.sections[0].offset) {
      EXPECT_EQ(damage.size(), 1u);
      EXPECT_TRUE(damage[0].offset <= static_cast<int64_t>(at) &&
                  static_cast<int64_t>(at) < damage[0].offset + damage[0].nbytes);
    }
    for (int i = 0; i < 20; ++i) {
      const int64_t n = pick(random, 20000);
      const auto found = looked_up(**stored, fqn_of(n));
      if (found.ok()) {
        ++untouched;
        EXPECT_EQ(*found, index.entries[static_cast<size_t>(n)]);
        continue;
      }
      ++refused;
      EXPECT_CODE(found, StatusCode::kCorruption);
      EXPECT_THAT(found.status().message(), AllOf(HasSubstr("step-1/.index"), HasSubstr("sum")));
    }
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(untouched, 300);
}

TEST(StoredIndexTest, AnyOtherLengthIsFoundAtOpening) {
  const std::vector<std::byte> bytes = written(large_index(5000, 2));
  for (const int64_t change : {-1, -8, -100000, 1, 8, 100000}) {
    std::vector<std::byte> other = bytes;
    other.resize(static_cast<size_t>(ssize(bytes) + change));
    EXPECT_CODE(opened(other), StatusCode::kCorruption) << change;
  }
}

// As where pages of an index took the place of those of another, each sound by itself.
TEST(StoredIndexTest, TheRestOfAnotherIndexIsNotTakenForItsOwn) {
  Index index = large_index(5000, 2);
  const std::vector<std::byte> ours = written(index);
  // As long as the word that was there.
  for (IndexedEntry& entry : index.entries) entry.dtype = "float8_x";
  std::vector<std::byte> theirs = written(index);
  ASSERT_EQ(ours.size(), theirs.size());
  std::copy_n(ours.begin(), sizeof(records::Header), theirs.begin());
  ASSERT_OK_AND_ASSIGN(const auto stored, opened(theirs));
  EXPECT_CODE(stored->find_entry(fqn_of(1)), StatusCode::kCorruption);
}

TEST(StoredIndexTest, ADamagedTopIsDamageToAll) {
  std::vector<std::byte> bytes = written(large_index(20000, 2));
  bytes[sizeof(records::Header)] ^= std::byte{1};
  ASSERT_OK_AND_ASSIGN(const auto stored, opened(bytes));
  ASSERT_OK_AND_ASSIGN(const std::vector<Region> damage, stored->damage());
  ASSERT_EQ(damage.size(), 1u);
  EXPECT_EQ(damage[0].offset + damage[0].nbytes, ssize(bytes));
  EXPECT_CODE(stored->find_entry(fqn_of(1)), StatusCode::kCorruption);
}

// A hole of a terabyte costs a disk nothing. Whoever opens such a file reads its start and no more,
// and what is then asked for fails at the first block.
TEST(StoredIndexTest, AFileThatClaimsATerabyteIsNotAllocated) {
  records::Header header = {};
  header.magic = records::kMagic;
  header.version = records::kVersion;
  header.block_nbytes = kSumBlockNbytes;
  header.flags = records::kHasEntries;
  constexpr uint64_t kEntries = uint64_t{1} << 31;
  std::array<uint64_t, records::kSectionCount> nbytes = {};
  nbytes[records::kEntrySection] = kEntries * sizeof(records::Entry);
  nbytes[records::kEntryNameSection] = kEntries * sizeof(records::Name);
  nbytes[records::kBoxSection] = uint64_t{1} << 39;
  nbytes[records::kDimSection] = uint64_t{1} << 39;
  nbytes[records::kTextSection] = uint64_t{1} << 31;
  uint64_t body = 0;
  for (const uint64_t n : nbytes) body += n;
  const uint64_t table = (body + kBlock - 1) / kBlock * 8;
  const uint64_t top = (table + kBlock - 1) / kBlock * 8;
  header.top = {sizeof(header), top};
  header.table = {header.top.offset + top, table};
  uint64_t end = header.table.offset + table;
  for (size_t id = 0; id < records::kSectionCount; ++id) {
    header.sections[id] = {end, nbytes[id]};
    end += nbytes[id];
  }
  // A top of zeros that is true, and nothing behind it that is.
  const std::vector<std::byte> zeros(top);
  header.top_sum = xxh3(zeros);
  header.header_sum = xxh3(
      Bytes(reinterpret_cast<const std::byte*>(&header), offsetof(records::Header, header_sum)));
  int64_t read_nbytes = 0;
  const auto read = [&](int64_t offset, MutableBytes into) {
    read_nbytes += ssize(into);
    std::ranges::fill(into, std::byte{0});
    if (offset == 0) std::memcpy(into.data(), &header, std::min(sizeof(header), into.size()));
    return ok_status();
  };
  ASSERT_OK_AND_ASSIGN(const auto stored,
                       StoredIndex::open(read, static_cast<int64_t>(end), "huge"));
  EXPECT_CODE(stored->find_entry("x"), StatusCode::kCorruption);
  EXPECT_CODE(stored->fqns(), StatusCode::kCorruption);
  EXPECT_CODE(stored->read_all(), StatusCode::kCorruption);
  EXPECT_LE(read_nbytes, 8 * kBlock);
}

// As above, but each index is asked for single names, by those who never list them all.
TEST(StoredIndexTest, NoSealedNonsenseIsBelieved) {
  const Index index = large_index(40, 3);
  const std::vector<std::byte> bytes = written(index);
  int refused = 0;
  for (uint32_t seed = 0; seed < 5000; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::byte> odd = bytes;
    for (int64_t change = 1 + pick(random, 3); change > 0; --change) {
      constexpr uint8_t kBytes[] = {0x00, 0x01, 0x7F, 0x80, 0xFF};
      odd[static_cast<size_t>(pick(random, ssize(odd)))] =
          static_cast<std::byte>(kBytes[random() % 5]);
    }
    fix_sums(odd);
    const auto stored = opened(odd);
    if (!stored.ok()) continue;
    for (int64_t i = 0; i < 40; i += 7) {
      const auto found = looked_up(**stored, fqn_of(i));
      if (!found.ok()) {
        ++refused;
        continue;
      }
      EXPECT_EQ(found->fqn, fqn_of(i));
      for (const IndexedBox& box : found->boxes) {
        ASSERT_LT(box.file, (*stored)->file_count());
        for (size_t d = 0; d < box.sizes.size(); ++d) {
          ASSERT_TRUE(range_within(box.offsets[d], box.sizes[d], found->sizes[d]));
        }
      }
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(StoredIndexTest, ANameThatIsThereTwiceIsRefusedByItself) {
  Index index = large_index(2, 1);
  index.entries[1].fqn = "other.name.as.long.weight";
  index.entries[0].fqn = "this..name.as.long.weight";
  std::vector<std::byte> bytes = written(index);
  records::Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  // Both entries, and both names, are of the first.
  const auto at = [&](records::SectionId id) { return bytes.data() + header.sections[id].offset; };
  std::memcpy(at(records::kEntrySection) + sizeof(records::Entry), at(records::kEntrySection), 8);
  const uint64_t hash = xxh3(as_bytes("this..name.as.long.weight"));
  for (uint32_t i = 0; i < 2; ++i) {
    const records::Name name = {hash, i, 0};
    std::memcpy(at(records::kEntryNameSection) + i * sizeof(name), &name, sizeof(name));
  }
  fix_sums(bytes);
  ASSERT_OK_AND_ASSIGN(const auto stored, opened(bytes));
  EXPECT_THAT(stored->find_entry("this..name.as.long.weight").status().message(),
              HasSubstr("twice"));
  EXPECT_THAT(stored->fqns().status().message(), HasSubstr("twice"));
}

}  // namespace
}  // namespace torch_ckpt::stored_index_test
