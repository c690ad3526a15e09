#include "format/index_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "format/index_records.h"
#include "support/example_index.h"
#include "support/golden.h"
#include "support/index_sums.h"
#include "support/opened_index.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::index_file_test {
namespace {

using ::testing::HasSubstr;

namespace records = index_records;

IndexedFile file(const std::string& name, int64_t nbytes) {
  BlockSummer summer(kSumBlockNbytes);
  summer.append(random_bytes(nbytes, static_cast<uint32_t>(nbytes)));
  return {name, summer.finish()};
}

Index sample() {
  Index index;
  index.save_id = "0123456789abcdef";
  index.metadata = {1234, 0xFEDCBA9876543210};
  index.files = {file("__0_0_a.distcp", 200000), file("__1_0_b.distcp", 70000), file("empty", 0)};
  index.has_entries = true;
  index.version = "1.0.0";
  index.entries = {
      {.fqn = "model.w",
       .is_tensor = true,
       .dtype = "bfloat16",
       .memory_format = "contiguous_format",
       .requires_grad = true,
       .sizes = {10, 6},
       .boxes = {{{0, 0}, {4, 6}, 0, 64, 1000, true, {}}, {{4, 0}, {6, 6}, 1, 0, 800, true, {}}}},
      {.fqn = "step", .boxes = {{{}, {}, 0, 4096, 500, false, {"zstd", "x"}}}},
      {.fqn = "scalar",
       .is_tensor = true,
       .dtype = "float32",
       .memory_format = "preserve_format",
       .pin_memory = true,
       .boxes = {{{}, {}, 1, 1024, 600, false, {}}}},
      {.fqn = "no chunks", .is_tensor = true, .dtype = "int8", .sizes = {0}},
  };
  index.has_paths = true;
  index.paths = {{"model.w", {std::string("model"), std::string("w")}},
                 {"list.-7", {std::string("list"), int64_t{-7}}}};
  return index;
}

// Some boxes and files have no digest and no origin.
Index digested_sample() {
  Index index = sample();
  index.files[0].origin = 0xFEDCBA9876543210;
  index.files[2].origin = 7;
  index.entries[0].boxes[0].digest = {1, 2, 3};
  index.entries[0].boxes[1].digest = {0xFFFFFFFFFFFFFFFF, 0, 0};
  index.entries[2].boxes[0].digest = {4, 0xFFFFFFFFFFFFFFFF, 0};
  return index;
}

records::Header header_of(const std::vector<std::byte>& bytes) {
  records::Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  return header;
}

TEST(IndexFileTest, WhatIsWrittenIsRead) {
  for (const bool has_entries : {true, false}) {
    Index index = sample();
    if (!has_entries) {
      index.has_entries = index.has_paths = false;
      index.version.clear();
      index.entries.clear();
      index.paths.clear();
    }
    ASSERT_OK_AND_ASSIGN(const Index read, parse_index(written(index)));
    EXPECT_EQ(read, index);
  }
  ASSERT_OK_AND_ASSIGN(const Index empty, parse_index(written({.save_id = "0123456789abcdef"})));
  EXPECT_EQ(empty, Index{.save_id = "0123456789abcdef"});
}

TEST(IndexFileTest, DigestsAndOriginsAreRead) {
  const Index index = digested_sample();
  ASSERT_OK_AND_ASSIGN(const Index read, parse_index(written(index)));
  EXPECT_EQ(read, index);
  const auto stored = opened(index);
  EXPECT_TRUE(stored->has_digests());
  for (int64_t i = 0; i < stored->entry_count(); ++i) {
    ASSERT_OK_AND_ASSIGN(const StoredEntry entry, stored->entry(i));
    for (int64_t k = 0; k < entry.box_count; ++k) {
      const IndexedBox& box = index.entries[static_cast<size_t>(i)].boxes[static_cast<size_t>(k)];
      EXPECT_EQ(*stored->digest(entry, k), box.digest);
    }
  }
  for (int64_t i = 0; i < stored->file_count(); ++i) {
    EXPECT_EQ(*stored->origin(i), index.files[static_cast<size_t>(i)].origin);
  }
  EXPECT_FALSE(opened(sample())->has_digests());
}

TEST(IndexFileTest, OriginsNeedNoEntriesAndDigestsNoOrigins) {
  Index origins = sample();
  origins.has_entries = origins.has_paths = false;
  origins.version.clear();
  origins.entries.clear();
  origins.paths.clear();
  origins.files[1].origin = 1;
  Index digests = sample();
  digests.entries[0].boxes[0].digest = {1, 0, 0};
  for (const Index& index : {origins, digests}) {
    ASSERT_OK_AND_ASSIGN(const Index read, parse_index(written(index)));
    EXPECT_EQ(read, index);
  }
}

// They find text to which nothing refers.
TEST(IndexFileTest, ReadersThatDoNotKnowDigestsReadTheRest) {
  std::vector<std::byte> bytes = written(digested_sample());
  records::Header header = header_of(bytes);
  ASSERT_EQ(header.flags, records::kHasEntries | records::kHasPaths | records::kHasDigests);
  header.flags &= ~records::kHasDigests;
  std::memcpy(bytes.data(), &header, sizeof(header));
  fix_sums(bytes);
  ASSERT_OK_AND_ASSIGN(const Index read, parse_index(bytes));
  EXPECT_EQ(read, sample());
}

TEST(IndexFileTest, DigestsThatDoNotLieInTheTextAreRefused) {
  const std::vector<std::byte> bytes = written(digested_sample());
  const records::Section text = header_of(bytes).sections[records::kTextSection];
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  const std::vector<std::pair<std::string, std::function<void(records::Section&)>>> breaches = {
      {"too short", [](records::Section& s) { s.nbytes -= 8; }},
      {"a record too few", [](records::Section& s) { s.nbytes -= s.nbytes / 3; }},
      {"too long", [](records::Section& s) { s.nbytes += 8; }},
      {"empty", [](records::Section& s) { s.nbytes = 0; }},
      {"of any length", [](records::Section& s) { s.nbytes = kMost; }},
      {"before the text", [&](records::Section& s) { s.offset = text.offset - 8; }},
      {"at the start", [](records::Section& s) { s.offset = 0; }},
      {"beyond the text",
       [&](records::Section& s) { s.offset = text.offset + text.nbytes - s.nbytes + 1; }},
      {"behind the text", [&](records::Section& s) { s.offset = text.offset + text.nbytes + 1; }},
      {"anywhere", [](records::Section& s) { s.offset = kMost - 7; }},
  };
  for (const auto member : {&records::Header::digests, &records::Header::origins}) {
    for (const auto& [what, breach] : breaches) {
      std::vector<std::byte> odd = bytes;
      records::Header header = header_of(odd);
      breach(header.*member);
      std::memcpy(odd.data(), &header, sizeof(header));
      fix_sums(odd);
      EXPECT_CODE(parse_index(odd), StatusCode::kCorruption) << what;
      EXPECT_CODE(opened(odd), StatusCode::kCorruption) << what;
    }
  }
}

// Of two tensors in one storage, and an object beside them.
Index foreign_sample() {
  Index index;
  index.save_id = "0123456789abcdef";
  index.files = {{.name = "model.pt", .sums = {}}};
  index.files[0].sums.file_nbytes = 5000;
  index.has_entries = index.has_paths = index.is_foreign = true;
  const IndexedBox box = {{0, 0}, {4, 6}, 0, 64, 96, true, {}};
  index.entries = {
      {.fqn = "w", .is_tensor = true, .dtype = "float32", .sizes = {4, 6}, .boxes = {box}},
      {.fqn = "w.t", .is_tensor = true, .dtype = "float32", .sizes = {4, 6}, .boxes = {box}},
      {.fqn = "step", .boxes = {{{}, {}, 0, 0, 64, false, {}}}},
  };
  index.entries[1].view = IndexedView{{1, 4}, 0, 0xFFFFFFFF};
  return index;
}

TEST(IndexFileTest, AForeignIndexIsReadInMemoryAlone) {
  const Index index = foreign_sample();
  const std::vector<std::byte> bytes = written(index);

  ASSERT_OK_AND_ASSIGN(const Index read, parse_index(bytes));
  EXPECT_EQ(read, index);
  EXPECT_EQ(opened(bytes).status().code(), StatusCode::kUnsupported);
}

TEST(IndexFileTest, SlicesShareBytesAndViewsAreThereInAForeignIndexOnly) {
  Index index = foreign_sample();
  index.is_foreign = false;
  index.files = {file("__0_0_a.distcp", 5000)};
  EXPECT_THAT(write_index(index).status().message(), HasSubstr("view"));
  index.entries[1].view.reset();
  EXPECT_THAT(write_index(index).status().message(), HasSubstr("slices overlap"));
}

TEST(IndexFileTest, AnImpossibleViewIsRefused) {
  for (const IndexedView& view : {IndexedView{{1, -4}, 0, 0}, IndexedView{{1, 4}, -1, 0},
                                  IndexedView{{1}, 0, 0}, IndexedView{{1, 4, 1}, 0, 0}}) {
    Index index = foreign_sample();
    index.entries[1].view = view;
    EXPECT_EQ(write_index(index).status().code(), StatusCode::kInvalidArgument);
  }
  Index index = foreign_sample();
  index.entries[1].boxes.push_back(index.entries[1].boxes[0]);
  EXPECT_EQ(write_index(index).status().code(), StatusCode::kInvalidArgument);
}

TEST(IndexFileTest, AnyFlippedBitIsCorruption) {
  const std::vector<std::byte> bytes = written(digested_sample());
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::vector<std::byte> damaged = bytes;
    damaged[at] ^= std::byte{1} << at % 8;
    ASSERT_CODE(parse_index(damaged), StatusCode::kCorruption) << "byte " << at;
  }
}

TEST(IndexFileTest, AnyOtherLengthIsCorruption) {
  std::vector<std::byte> bytes = written(digested_sample());
  for (size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
    ASSERT_CODE(parse_index(Bytes(bytes).first(nbytes)), StatusCode::kCorruption) << nbytes;
  }
  bytes.resize(bytes.size() + 8);
  EXPECT_CODE(parse_index(bytes), StatusCode::kCorruption);
}

TEST(IndexFileTest, ANewerVersionIsUnsupported) {
  std::vector<std::byte> bytes = written(sample());
  const uint32_t version = records::kVersion + 1;
  std::memcpy(bytes.data() + offsetof(records::Header, version), &version, sizeof(version));
  fix_sums(bytes);
  EXPECT_CODE(parse_index(bytes), StatusCode::kUnsupported);
}

TEST(IndexFileTest, AHeaderAloneIsAnIndexOfNothing) {
  records::Header header = {};
  header.magic = records::kMagic;
  header.version = records::kVersion;
  header.block_nbytes = kSumBlockNbytes;
  for (records::Section& section : header.sections) section = {sizeof(header), 0};
  header.top = header.table = {sizeof(header), 0};
  std::vector<std::byte> bytes(sizeof(header));
  std::memcpy(bytes.data(), &header, sizeof(header));
  fix_sums(bytes);
  ASSERT_OK_AND_ASSIGN(const Index index, parse_index(bytes));
  EXPECT_TRUE(index.files.empty());
}

// With true checksums, whatever stands in a record: an error, or a value that is sound.
TEST(IndexFileTest, NoSealedNonsenseIsBelieved) {
  const std::vector<std::byte> bytes[] = {written(sample()), written(digested_sample())};
  int64_t refused = 0;
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::byte> odd = bytes[seed % 2];
    for (int64_t change = 1 + pick(random, 3); change > 0; --change) {
      const auto at = static_cast<size_t>(pick(random, ssize(odd)));
      constexpr uint8_t kBytes[] = {0x00, 0x01, 0x7F, 0x80, 0xFF};
      odd[at] = static_cast<std::byte>(kBytes[random() % 5]);
    }
    fix_sums(odd);
    const auto parsed = parse_index(odd);
    if (!parsed.ok()) {
      ++refused;
      continue;
    }
    for (const IndexedEntry& entry : parsed->entries) {
      for (const IndexedBox& box : entry.boxes) {
        const IndexedFile& in = parsed->files[static_cast<size_t>(box.file)];
        ASSERT_TRUE(range_within(box.offset, box.nbytes, in.sums.file_nbytes)) << "seed " << seed;
        for (size_t d = 0; d < box.sizes.size(); ++d) {
          ASSERT_TRUE(range_within(box.offsets[d], box.sizes[d], entry.sizes[d]));
        }
      }
    }
  }
  EXPECT_GT(refused, 5000);
}

TEST(IndexFileTest, WhatCannotBeTrueIsNotWritten) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const std::vector<std::pair<std::string, std::function<void(Index&)>>> breaches = {
      {"short save id", [](Index& i) { i.save_id = "x"; }},
      {"file in a folder", [](Index& i) { i.files[0].name = "a/b"; }},
      {"file above", [](Index& i) { i.files[0].name = ".."; }},
      {"nameless file", [](Index& i) { i.files[0].name = ""; }},
      {"file with a zero byte", [](Index& i) { i.files[0].name = std::string("a\0b", 3); }},
      {"file twice", [](Index& i) { i.files[1].name = i.files[0].name; }},
      {"missing sum", [](Index& i) { i.files[0].sums.sums.pop_back(); }},
      {"sum too many", [](Index& i) { i.files[0].sums.sums.push_back(1); }},
      {"negative length", [](Index& i) { i.files[2].sums.file_nbytes = -1; }},
      {"FQN twice", [](Index& i) { i.entries[0].fqn = "step"; }},
      {"negative size", [](Index& i) { i.entries[3].sizes = {-1}; }},
      {"box outside",
       [](Index& i) {
         i.entries[0].boxes[1].offsets = {5, 0};
       }},
      {"negative offset",
       [](Index& i) {
         i.entries[0].boxes[1].offsets = {-1, 0};
       }},
      {"box of other rank", [](Index& i) { i.entries[0].boxes[1].offsets = {0}; }},
      {"too many elements",
       [](Index& i) {
         i.entries[0].sizes = {kMost, kMost};
       }},
      {"no such file", [](Index& i) { i.entries[1].boxes[0].file = 3; }},
      {"negative file", [](Index& i) { i.entries[1].boxes[0].file = -1; }},
      {"slice beyond its file", [](Index& i) { i.entries[1].boxes[0].offset = 199999; }},
      {"slice of any length", [](Index& i) { i.entries[1].boxes[0].nbytes = kMost; }},
      {"slice before its file", [](Index& i) { i.entries[1].boxes[0].offset = -1; }},
      {"slices that overlap", [](Index& i) { i.entries[1].boxes[0].offset = 1063; }},
      {"object of two boxes",
       [](Index& i) {
         i.entries[1].boxes.push_back({{}, {}, 2, 0, 0, false, {}});
       }},
      {"object of no box", [](Index& i) { i.entries[1].boxes.clear(); }},
      {"transform without a name",
       [](Index& i) {
         i.entries[1].boxes[0].transforms = {"", "x"};
       }},
      {"name that is not UTF-8", [](Index& i) { i.entries[0].fqn = "a\xC0\x80"; }},
      {"key of half a surrogate",
       [](Index& i) { i.paths[0].keys = {std::string("\xED\xA0\x80")}; }},
      {"bytes that cannot be counted", [](Index& i) { i.entries[3].sizes = {kMost / 8}; }},
      {"odd blocks",
       [](Index& i) {
         for (IndexedFile& f : i.files) f.sums.block_nbytes = 12345;
       }},
      {"long blocks",
       [](Index& i) {
         for (IndexedFile& f : i.files) f.sums.block_nbytes = 2 << 20;
       }},
      {"long word", [](Index& i) { i.entries[0].dtype = std::string(65, 'x'); }},
      {"many dimensions", [](Index& i) { i.entries[3].sizes = Dims(65, 1); }},
  };
  for (const auto& [what, breach] : breaches) {
    Index index = sample();
    breach(index);
    EXPECT_CODE(write_index(index), StatusCode::kInvalidArgument) << what;
  }
}

// A text is stored once and may be named by every record, which must not multiply it without bound.
TEST(IndexFileTest, TextThatIsUsedTooOftenIsRefused) {
  Index index = sample();
  const std::string key(100000, 'k');
  index.paths.clear();
  for (int i = 0; i < 1000; ++i) index.paths.push_back({std::to_string(i), {key}});
  const auto bytes = write_index(index);
  EXPECT_CODE(bytes, StatusCode::kInvalidArgument);
  EXPECT_THAT(bytes.status().message(), HasSubstr("text"));
}

TEST(IndexFileTest, WritesTheExampleInFormatMd) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, write_index(example_index()));
  EXPECT_TRUE(format_md_listing("Example of an index") == as_text(bytes))
      << "the example differs from what write_index writes";
}

TEST(IndexFileTest, ReadsTheExampleInFormatMd) {
  const std::string shown = format_md_listing("Example of an index");
  ASSERT_OK_AND_ASSIGN(const Index index, parse_index(as_bytes(shown)));
  EXPECT_EQ(index, example_index());
}

TEST(IndexFileTest, TheTrailerIsTheOneInFormatMd) {
  const std::string shown = format_md_listing("Example of a trailer");
  const MetadataTrailer trailer = {example_index().save_id, example_index().metadata};
  ASSERT_OK_AND_ASSIGN(const auto written, write_metadata_trailer(trailer));
  EXPECT_TRUE(shown == as_text(written)) << "the example differs from what is written";
  ASSERT_OK_AND_ASSIGN(const MetadataTrailer read,
                       parse_metadata_trailer(as_bytes(shown), 12 + kMetadataTrailerNbytes));
  EXPECT_EQ(read, trailer);
}

}  // namespace
}  // namespace torch_ckpt::index_file_test
