// What a save finds in its base, and what digests an index and a data file have.

#include "engine/save/reuse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/load/verify_job.h"
#include "engine/value_digest.h"
#include "format/index_file.h"
#include "plan/work.h"
#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/plan_items.h"
#include "support/saved_checkpoint.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/tensor_digests.h"
#include "support/test_tensor.h"

namespace torch_ckpt::reuse_test {
namespace {

using index_records::Digest;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Names = std::vector<std::optional<BoxName>>;

constexpr int64_t kSlice = 1000;

// ---- What is found in the base ----

IndexedBox stored_box(Dims offsets, Dims sizes, int64_t file, int64_t number,
                      const Digest& digest) {
  return {.offsets = std::move(offsets),
          .sizes = std::move(sizes),
          .file = file,
          .offset = number * kSlice,
          .nbytes = kSlice,
          .plain = true,
          .digest = digest};
}

// A tensor in two boxes, one whole, and an object.
Index base_index() {
  Index index;
  index.save_id = "0123456789abcdef";
  index.has_entries = true;
  for (const char* name : {"a", "b"}) {
    IndexedFile file = {.name = name};
    file.sums.file_nbytes = 10 * kSlice;
    file.sums.sums.push_back(1);
    index.files.push_back(std::move(file));
  }
  index.entries = {
      {.fqn = "rows",
       .is_tensor = true,
       .dtype = "float32",
       .sizes = {10, 4},
       .boxes = {stored_box({0, 0}, {6, 4}, 0, 0, {1, 11, 12}),
                 stored_box({6, 0}, {4, 4}, 1, 0, {2, 21, 22})}},
      {.fqn = "whole",
       .is_tensor = true,
       .dtype = "float32",
       .sizes = {8},
       .boxes = {stored_box({0}, {8}, 1, 1, {3, 31, 32})}},
      {.fqn = "step", .boxes = {{{}, {}, 0, 2 * kSlice, kSlice}}},
  };
  return index;
}

// What a save of all these items finds.
BaseBoxes found_in(const Index& index, const std::vector<PlanItem>& items,
                   std::vector<uint64_t> samples, const Names& names = {}) {
  const Work work(std::make_shared<ItemTable>(table_of(items)));
  auto found = find_in_base(*opened(index), work, samples, names);
  EXPECT_OK(found);
  return std::move(*found);
}

std::vector<int64_t> positions(const std::vector<BaseBox>& boxes) {
  std::vector<int64_t> out;
  for (const BaseBox& box : boxes) out.push_back(box.position);
  return out;
}

const PlanItem kWhole = whole_item("whole", float_facts({8}));

TEST(ReuseTest, ABoxOfTheSameNameDtypePlaceAndSampleIsFound) {
  const BaseBoxes found =
      found_in(base_index(),
               {object_item("step", 500), kWhole, float_shard("rows", {10, 4}, {6, 0}, {4, 4}),
                float_shard("rows", {10, 4}, {0, 0}, {6, 4})},
               {7, 3, 2, 99});
  ASSERT_THAT(positions(found.equal), ElementsAre(1, 2));
  EXPECT_THAT(found.changed, ElementsAre(3));
  EXPECT_EQ(found.equal[0].place, (StoredPlace{1, kSlice, kSlice}));
  EXPECT_EQ(found.equal[0].digest, (Digest{3, 31, 32}));
  EXPECT_EQ(found.equal[1].place, (StoredPlace{1, 0, kSlice}));
  EXPECT_EQ(found.equal[1].digest, (Digest{2, 21, 22}));
}

TEST(ReuseTest, ABoxThatDiffersInAnythingElseIsNotFound) {
  Facts other_dtype = float_facts({8});
  other_dtype.dtype = "int32";
  const std::vector<std::pair<std::string, PlanItem>> others = {
      {"name", whole_item("while", float_facts({8}))},
      {"dtype", whole_item("whole", other_dtype)},
      {"sizes", whole_item("whole", float_facts({7}))},
      {"dimensions", whole_item("whole", float_facts({8, 1}))},
      {"part", float_shard("whole", {8}, {0}, {4})},
      {"offset", float_shard("whole", {12}, {4}, {8})},
      {"object in place of a tensor", object_item("whole", 32)},
      {"tensor in place of an object", whole_item("step", float_facts({8}))},
      {"joined", whole_item("rows", float_facts({10, 4}))},
  };
  for (const auto& [what, item] : others) {
    const BaseBoxes found = found_in(base_index(), {item}, {3});
    EXPECT_THAT(positions(found.equal), IsEmpty()) << what;
    EXPECT_THAT(found.changed, IsEmpty()) << what;
  }
  // The shape of the whole tensor may be another one: the box has the same elements.
  EXPECT_THAT(positions(found_in(base_index(), {float_shard("whole", {20}, {0}, {8})}, {3}).equal),
              ElementsAre(0));
}

TEST(ReuseTest, ABoxThatTheBaseCannotVouchForIsNotFound) {
  const std::vector<std::pair<std::string, std::function<void(IndexedBox&)>>> reasons = {
      {"only torch can read it", [](IndexedBox& box) { box.plain = false; }},
      {"transformed", [](IndexedBox& box) { box.transforms = {"zstd"}; }},
      {"no digest", [](IndexedBox& box) { box.digest = {}; }},
      {"a sample alone",
       [](IndexedBox& box) {
         box.digest = {3, kUnknownDigest, 0};
       }},
  };
  for (const auto& [what, spoil] : reasons) {
    Index index = base_index();
    spoil(index.entries[1].boxes[0]);
    const BaseBoxes found = found_in(index, {kWhole}, {3});
    EXPECT_THAT(positions(found.equal), IsEmpty()) << what;
    EXPECT_THAT(found.changed, IsEmpty()) << what;
  }
  // A sample alone tells that a tensor has changed.
  Index index = base_index();
  index.entries[1].boxes[0].digest = {3, kUnknownDigest, 0};
  EXPECT_THAT(found_in(index, {kWhole}, {4}).changed, ElementsAre(0));
}

TEST(ReuseTest, AnItemWithoutASampleIsNotLookedUp) {
  const BaseBoxes found = found_in(base_index(), {kWhole}, {kUnknownDigest});
  EXPECT_THAT(positions(found.equal), IsEmpty());
  EXPECT_THAT(found.changed, IsEmpty());
}

TEST(ReuseTest, ABaseWithoutDigestsOrEntriesHasNothing) {
  Index without = base_index();
  for (IndexedEntry& entry : without.entries) {
    for (IndexedBox& box : entry.boxes) box.digest = {};
  }
  EXPECT_FALSE(opened(without)->has_digests());
  EXPECT_THAT(positions(found_in(without, {kWhole}, {3}).equal), IsEmpty());
  Index no_entries = base_index();
  no_entries.has_entries = false;
  no_entries.entries.clear();
  no_entries.files[0].origin = 7;
  EXPECT_TRUE(opened(no_entries)->has_digests());
  EXPECT_THAT(positions(found_in(no_entries, {kWhole}, {3}).equal), IsEmpty());
}

TEST(ReuseTest, AForeignIndexHasNothing) {
  Index index = base_index();
  index.is_foreign = true;
  for (IndexedFile& file : index.files) file.sums.sums.clear();
  const std::vector<std::byte> bytes = written(index);
  ASSERT_OK_AND_ASSIGN(const auto base, StoredIndex::in_memory(bytes));
  const Work work(std::make_shared<ItemTable>(table_of({kWhole})));
  const std::vector<uint64_t> samples = {3};
  ASSERT_OK_AND_ASSIGN(const BaseBoxes found, find_in_base(*base, work, samples, {}));
  EXPECT_THAT(positions(found.equal), IsEmpty());
}

// An item that is cut is the box of its rows.
TEST(ReuseTest, CutRowsAreFoundByTheRowsThatAreStored) {
  const auto table =
      std::make_shared<ItemTable>(table_of({whole_item("rows", float_facts({10, 4})), kWhole}));
  const struct {
    Cut cut;
    std::vector<int64_t> equal;
  } cases[] = {
      {{.item = 0, .first_row = 6, .rows = 4}, {0}},
      {{.item = 0, .first_row = 5, .rows = 4}, {}},
      {{.item = 0, .first_row = 6, .rows = 3}, {}},
      {{.item = 0, .first_row = 0, .rows = 4}, {}},
  };
  for (const auto& [cut, equal] : cases) {
    ASSERT_OK_AND_ASSIGN(const Work work,
                         Work::assigned(table, {.item_count = 2, .runs = {{0, 1}}, .cuts = {cut}}));
    const std::vector<uint64_t> samples = {2};
    ASSERT_OK_AND_ASSIGN(const BaseBoxes found,
                         find_in_base(*opened(base_index()), work, samples, {}));
    EXPECT_EQ(positions(found.equal), equal) << cut.first_row << " " << cut.rows;
  }
}

// The items of a plan of DCP have no FQNs in their work.
TEST(ReuseTest, NamesThatAreGivenReplaceThoseOfTheWork) {
  const std::vector<PlanItem> items = {
      whole_item("0", float_facts({4, 4})), whole_item("1", float_facts({8})),
      whole_item("whole", float_facts({8})), whole_item("3", float_facts({8}))};
  const BaseBoxes found = found_in(
      base_index(), items, {2, 3, 3, 3},
      {BoxName{"rows", {6, 0}}, BoxName{"whole", {0}}, std::nullopt, BoxName{"none", {0}}});
  EXPECT_THAT(positions(found.equal), ElementsAre(0, 1));
  EXPECT_THAT(found.changed, IsEmpty());
}

// ---- Reports of ranks ----

std::vector<std::byte> report_of(const std::vector<SliceDigest>& digests) {
  const Bytes bytes = std::as_bytes(std::span(digests));
  return {bytes.begin(), bytes.end()};
}

TEST(ReuseTest, ReportsGiveBoxesTheirDigests) {
  Index index = base_index();
  for (IndexedEntry& entry : index.entries) {
    for (IndexedBox& box : entry.boxes) box.digest = {};
  }
  const Digest digest = {5, 6, 7};
  // The file has a slice that is dead, and an object.
  const auto one = report_of({{0, {1, 2, 3}}, {2 * kSlice, digest}, {5 * kSlice, digest}});
  const auto other = report_of({{kSlice, digest}});
  const std::vector<Bytes> reports = {one, other};
  ASSERT_OK(add_digests(index, reports));
  EXPECT_EQ(index.entries[0].boxes[0].digest, (Digest{1, 2, 3}));
  EXPECT_EQ(index.entries[0].boxes[1].digest, Digest());
  EXPECT_EQ(index.entries[1].boxes[0].digest, digest);
  EXPECT_EQ(index.entries[2].boxes[0].digest, Digest()) << "an object";

  const std::vector<Bytes> none = {Bytes(), Bytes()};
  Index unchanged = base_index();
  ASSERT_OK(add_digests(unchanged, none));
  EXPECT_EQ(unchanged, base_index());
}

TEST(ReuseTest, ReportsOfAnotherFormAreRefused) {
  const auto sound = report_of({{0, {1, 2, 3}}, {kSlice, {4, 5, 6}}});
  const auto unsorted = report_of({{kSlice, {4, 5, 6}}, {0, {1, 2, 3}}});
  const Bytes cut = Bytes(sound).first(sound.size() - 8);
  const std::vector<std::vector<Bytes>> refused = {
      {}, {sound}, {sound, sound, sound}, {unsorted, sound}, {sound, cut}};
  for (const std::vector<Bytes>& reports : refused) {
    Index index = base_index();
    EXPECT_CODE(add_digests(index, reports), StatusCode::kInternal);
  }
  Index index = base_index();
  index.entries[1].boxes[0].file = 2;
  const std::vector<Bytes> reports = {sound, sound};
  EXPECT_CODE(add_digests(index, reports), StatusCode::kInternal);
}

// ---- Digests of stored elements ----

// Tensors of every length in one file, whose index has their digests.
struct Digested {
  MemoryFileSystem fs;
  std::vector<TestTensor> saved = {
      TestTensor::random("scalar", DType::kFloat64, {}, 1),
      TestTensor::random("empty", DType::kFloat32, {0, 3}, 2),
      TestTensor::random("strided", DType::kBFloat16, {300, 200}, 3).transposed(0, 1),
      TestTensor::random("long", DType::kUInt8, {kDigestPieceNbytes + 5}, 4),
  };
  std::vector<StoredSlice> slices = save_file(fs, "a", saved);
  Index index;

  Digested() {
    index.save_id = "0123456789abcdef";
    index.has_entries = true;
    BlockSummer summer(kSumBlockNbytes);
    summer.append(as_bytes(*fs.contents(str_cat(kCheckpoint, "/a"))));
    index.files = {{.name = "a", .sums = summer.finish()}};
    const Layout layout = layout_of(saved);
    for (size_t i = 0; i < saved.size(); ++i) {
      index.entries.push_back(entry_of(saved[i].live, layout.slices[i], 0));
      const Digest128 digest = full_digest_of(saved[i]);
      index.entries[i].boxes[0].digest = {1, digest.low, digest.high};
    }
  }
  Result<std::vector<int64_t>> check(int64_t entry) {
    ASSIGN_OR_RETURN(const auto job,
                     VerifyJob::make(fs, kCheckpoint, opened(index),
                                     {.buffer_nbytes = 1 << 20, .block_nbytes = 256 << 10}));
    return job->check_digests(entry);
  }
};

TEST(ReuseTest, StoredElementsHaveTheDigestOfTheTensor) {
  Digested a;
  for (int64_t i = 0; i < std::ssize(a.saved); ++i) {
    ASSERT_OK_AND_ASSIGN(const auto wrong, a.check(i));
    EXPECT_THAT(wrong, IsEmpty()) << i;
  }
}

TEST(ReuseTest, OtherElementsAndOtherDigestsAreFound) {
  for (const size_t i : {0u, 2u, 3u}) {
    Digested a;
    const int64_t nbytes = std::ssize(a.saved[i].packed());
    flip_bit(a.fs, "a", payload_offset(a.fs, a.slices[i]) + nbytes - 1);
    ASSERT_OK_AND_ASSIGN(const auto wrong, a.check(static_cast<int64_t>(i)));
    EXPECT_THAT(wrong, ElementsAre(0)) << i;
  }
  const std::vector<std::function<void(Digest&)>> changes = {[](Digest& d) { d.low ^= 1; },
                                                             [](Digest& d) { d.high ^= 1; }};
  for (const auto& change : changes) {
    for (const size_t i : {0u, 1u, 2u}) {
      Digested a;
      change(a.index.entries[i].boxes[0].digest);
      ASSERT_OK_AND_ASSIGN(const auto wrong, a.check(static_cast<int64_t>(i)));
      EXPECT_THAT(wrong, ElementsAre(0)) << i;
    }
  }
}

TEST(ReuseTest, ADigestThatIsUnknownIsNotChecked) {
  Digested a;
  flip_bit(a.fs, "a", payload_offset(a.fs, a.slices[2]));
  a.index.entries[2].boxes[0].digest = {1, kUnknownDigest, 0};
  ASSERT_OK_AND_ASSIGN(const auto none, a.check(2));
  EXPECT_THAT(none, IsEmpty());
  ASSERT_OK(a.fs.remove(str_cat(kCheckpoint, "/a")));
  EXPECT_CODE(a.check(0), StatusCode::kNotFound);
}

}  // namespace
}  // namespace torch_ckpt::reuse_test
