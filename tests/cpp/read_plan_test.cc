#include "engine/load/read_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/opened_index.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/strided_oracle.h"

namespace torch_ckpt::read_plan_test {
namespace {

using ::testing::HasSubstr;

Dims sum(const Dims& a, const Dims& b) {
  Dims out = a;
  for (size_t d = 0; d < b.size(); ++d) out[d] += b[d];
  return out;
}

bool lies_in(const Dims& at, const Dims& offsets, const Dims& sizes) {
  for (size_t d = 0; d < at.size(); ++d) {
    if (at[d] < offsets[d] || at[d] >= offsets[d] + sizes[d]) return false;
  }
  return true;
}

// An index of two files, in which slices lie one behind another.
class IndexMaker {
 public:
  IndexMaker() {
    index_.save_id = "0123456789abcdef";
    index_.has_entries = true;
    index_.files.resize(2);
    index_.files[0].name = "__0_0.distcp";
    index_.files[1].name = "__1_0.distcp";
  }

  IndexedEntry& add(std::string fqn, const Facts& facts) {
    IndexedEntry& entry = index_.entries.emplace_back();
    entry.fqn = std::move(fqn);
    entry.is_tensor = facts.is_tensor;
    entry.dtype = facts.dtype;
    entry.memory_format = facts.memory_format;
    entry.sizes = facts.sizes;
    return entry;
  }

  void add_box(IndexedEntry& entry, Dims offsets, Dims sizes, int64_t file = 0) {
    int64_t& end = index_.files[static_cast<size_t>(file)].sums.file_nbytes;
    const int64_t nbytes = 64 + 4 * *checked_numel(sizes);
    entry.boxes.push_back({std::move(offsets), std::move(sizes), file, end, nbytes, true, {}});
    end += nbytes;
  }

  void add_object(std::string fqn) { add_box(add(std::move(fqn), Facts{}), {}, {}, 1); }

  void add_whole(std::string fqn, const Dims& sizes) {
    add_box(add(std::move(fqn), float_facts(sizes)), Dims(sizes.size()), sizes);
  }

  const Index& index() {
    for (IndexedFile& file : index_.files) {
      file.sums.sums.resize(
          static_cast<size_t>(BlockGrid::block_count(file.sums.file_nbytes, kSumBlockNbytes)));
    }
    return index_;
  }

 private:
  Index index_;
};

// Cuts a box in two, and those again, anywhere: a tiling that need not be a grid.
void tile(std::mt19937& random, const Dims& offsets, const Dims& sizes,
          std::vector<std::pair<Dims, Dims>>* out) {
  std::vector<size_t> can;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1) can.push_back(d);
  }
  if (can.empty() || pick(random, 3) == 0) return out->push_back({offsets, sizes});
  const size_t d = can[static_cast<size_t>(pick(random, std::ssize(can)))];
  const int64_t at = 1 + pick(random, sizes[d] - 1);
  Dims lower = sizes;
  Dims upper = sizes;
  Dims begin = offsets;
  lower[d] = at;
  upper[d] -= at;
  begin[d] += at;
  tile(random, offsets, lower, out);
  tile(random, begin, upper, out);
}

std::pair<Dims, Dims> random_box(std::mt19937& random, const Dims& within) {
  Dims offsets(within.size());
  Dims sizes = within;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (pick(random, 3) == 0) continue;
    offsets[d] = pick(random, sizes[d] + 1);
    sizes[d] = pick(random, sizes[d] - offsets[d] + 1);
  }
  return {offsets, sizes};
}

Index random_index(std::mt19937& random) {
  IndexMaker maker;
  for (int64_t t = 0; t < 1 + pick(random, 5); ++t) {
    const std::string fqn = "model." + std::to_string(t);
    if (pick(random, 6) == 0) {
      maker.add_object(fqn);
      continue;
    }
    Dims sizes(static_cast<size_t>(pick(random, 5)));
    for (int64_t& size : sizes) size = pick(random, 12) == 0 ? 0 : 1 + pick(random, 6);
    std::vector<std::pair<Dims, Dims>> boxes;
    tile(random, Dims(sizes.size()), sizes, &boxes);
    if (pick(random, 6) == 0 && !boxes.empty()) boxes.pop_back();
    if (pick(random, 4) == 0 && !sizes.empty()) {
      auto [at, empty] = boxes.empty() ? std::pair(Dims(sizes.size()), sizes) : boxes.front();
      empty[static_cast<size_t>(pick(random, std::ssize(sizes)))] = 0;
      boxes.push_back({at, empty});
    }
    if (pick(random, 4) == 0 && !boxes.empty()) boxes.push_back(boxes.front());
    if (pick(random, 6) == 0) boxes.push_back(random_box(random, sizes));
    for (size_t i = boxes.size(); i > 1; --i) {
      std::swap(boxes[i - 1], boxes[static_cast<size_t>(pick(random, static_cast<int64_t>(i)))]);
    }
    IndexedEntry& entry = maker.add(fqn, float_facts(sizes));
    for (auto& [offsets, local] : boxes) maker.add_box(entry, offsets, local, pick(random, 2));
    for (IndexedBox& box : entry.boxes) {
      if (pick(random, 5) == 0) box.transforms = {"zstd"};
    }
  }
  return maker.index();
}

// Boxes of all tensors, and objects; some of them not stored.
std::vector<PlanItem> random_wanted(std::mt19937& random, const Index& index) {
  std::vector<PlanItem> out;
  for (int64_t i = pick(random, 12); i > 0; --i) {
    if (pick(random, 8) == 0) {
      out.push_back(float_shard("other." + std::to_string(i), {4}, {0}, {4}));
      continue;
    }
    const auto number = static_cast<size_t>(pick(random, std::ssize(index.entries)));
    const IndexedEntry& entry = index.entries[number];
    if (!entry.is_tensor) {
      out.push_back(object_item(entry.fqn, 5));
      continue;
    }
    auto [offsets, sizes] = random_box(random, entry.sizes);
    const bool is_empty = pick(random, 8) == 0;
    for (size_t d = 0; is_empty && d < sizes.size(); ++d) {
      if (pick(random, 3) != 0) sizes[d] = 0, offsets[d] = pick(random, 20);
    }
    out.push_back(float_shard(entry.fqn, entry.sizes, offsets, sizes));
  }
  return out;
}

const IndexedEntry* find(const Index& index, const std::string& fqn) {
  for (const IndexedEntry& entry : index.entries) {
    if (entry.fqn == fqn) return &entry;
  }
  return nullptr;
}

// How the stored boxes of an item's tensor fill it. Equal boxes count once.
struct Filled {
  bool has_hole = false;
  bool has_overlap = false;

  bool is_exact() const { return !has_hole && !has_overlap; }
};

Filled filled(const Index& index, const PlanItem& item) {
  Filled out;
  const IndexedEntry* entry = find(index, item.fqn);
  if (entry == nullptr || !entry->is_tensor) return out;
  std::set<std::pair<Dims, Dims>> boxes;
  for (const IndexedBox& box : entry->boxes) boxes.emplace(box.offsets, box.sizes);
  for_each_index(item.box.sizes, [&](const Dims& at) {
    const auto count = std::count_if(boxes.begin(), boxes.end(), [&](const auto& box) {
      return lies_in(sum(item.box.offsets, at), box.first, box.second);
    });
    out.has_hole = out.has_hole || count == 0;
    out.has_overlap = out.has_overlap || count > 1;
  });
  return out;
}

// Whether the reads of one item fill it, each element once and from its place. Adds the number of
// elements.
void expect_painted(const Index& index, const PlanItem& item, const ReadPlan& plan, int64_t number,
                    int64_t* painted) {
  const IndexedEntry* entry = find(index, item.fqn);
  std::map<Dims, int> times;
  int64_t objects = 0;
  for (const PlannedRead& read : plan.reads()) {
    if (read.item != number) continue;
    ASSERT_NE(entry, nullptr);
    ASSERT_LT(read.box, std::ssize(entry->boxes));
    const IndexedBox& box = entry->boxes[static_cast<size_t>(read.box)];
    ASSERT_EQ(read.place, (StoredPlace{box.file, box.offset, box.nbytes}));
    ASSERT_EQ(plan.file(box.file), index.files[static_cast<size_t>(box.file)].name);
    ASSERT_EQ(plan.stored_dtype(number), entry->dtype);
    ASSERT_EQ(read.is_transformed, !box.transforms.empty());
    ASSERT_EQ(read.box_offsets, box.offsets);
    ASSERT_EQ(read.is_object, !entry->is_tensor);
    objects += read.is_object ? 1 : 0;
    if (read.is_object) continue;
    ASSERT_GT(*checked_numel(read.lengths), 0);
    ASSERT_EQ(read.lengths.size(), entry->sizes.size());
    for_each_index(read.lengths, [&](const Dims& at) {
      const Dims in_box = sum(read.storage_offsets, at);
      const Dims in_item = sum(read.dest_offsets, at);
      ASSERT_TRUE(lies_in(in_box, Dims(at.size()), box.sizes));
      ASSERT_TRUE(lies_in(in_item, Dims(at.size()), item.box.sizes));
      ASSERT_EQ(sum(box.offsets, in_box), sum(item.box.offsets, in_item)) << "another element";
      ++times[in_item];
    });
  }
  if (entry == nullptr) return;
  ASSERT_EQ(objects, entry->is_tensor ? 0 : 1);
  if (!entry->is_tensor) return;
  for_each_index(item.box.sizes, [&](const Dims& at) {
    ASSERT_EQ(times[at], 1) << ::testing::PrintToString(at);
    ++*painted;
  });
}

// Expects the error of an item whose stored boxes have a hole or an overlap.
void expect_refused(const StoredIndex& stored, const PlanItem& item, const Filled& boxes) {
  const auto refused = ReadPlan::make(stored, table_of({item}), true);
  ASSERT_FALSE(refused.ok());
  const std::string& message = refused.status().message();
  EXPECT_THAT(message,
              HasSubstr("cannot load " + to_string(item.box) + " of '" + item.fqn + "': "));
  if (refused.status().code() == StatusCode::kMismatch) {
    EXPECT_TRUE(boxes.has_hole);
    EXPECT_THAT(message, HasSubstr(": no stored box contains ["));
  } else {
    EXPECT_CODE(refused, StatusCode::kCorruption);
    EXPECT_TRUE(boxes.has_overlap);
    EXPECT_THAT(message, HasSubstr(": different stored boxes contain ["));
  }
}

TEST(ReadPlanTest, EveryWantedElementIsReadOnceFromItsPlaceOrIsAnError) {
  int64_t painted = 0;
  int64_t holes = 0;
  int64_t overlaps = 0;
  for (uint32_t seed = 0; seed < 6000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Index index = random_index(random);
    const auto stored = opened(index);
    std::vector<PlanItem> wanted;
    for (PlanItem& item : random_wanted(random, index)) {
      const Filled boxes = filled(index, item);
      if (boxes.is_exact()) {
        wanted.push_back(std::move(item));
        continue;
      }
      holes += boxes.has_hole ? 1 : 0;
      overlaps += boxes.has_overlap ? 1 : 0;
      ASSERT_NO_FATAL_FAILURE(expect_refused(*stored, item, boxes));
    }
    const ItemTable table = table_of(wanted);
    ASSERT_OK_AND_ASSIGN(const ReadPlan plan, ReadPlan::make(*stored, table, true));
    int64_t former = 0;
    for (const PlannedRead& read : plan.reads()) {
      ASSERT_LE(former, read.item) << "in the order of items";
      former = read.item;
    }
    bool all_stored = true;
    for (size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_NO_FATAL_FAILURE(
          expect_painted(index, wanted[i], plan, static_cast<int64_t>(i), &painted));
      all_stored = all_stored && find(index, wanted[i].fqn) != nullptr;
    }
    ASSERT_CODE(ReadPlan::make(*stored, table, false),
                all_stored ? StatusCode::kOk : StatusCode::kNotFound);
  }
  EXPECT_GT(painted, 20000);
  EXPECT_GT(holes, 500);
  EXPECT_GT(overlaps, 200);
}

Result<ReadPlan> planned(IndexMaker& maker, const std::vector<PlanItem>& wanted,
                         bool partial = false) {
  return ReadPlan::make(*opened(maker.index()), table_of(wanted), partial);
}

TEST(ReadPlanTest, WhatIsNotStoredIsNamedOrLeftOut) {
  IndexMaker maker;
  maker.add_whole("a", {4});
  const std::vector<PlanItem> wanted = {float_shard("b", {4}, {0}, {4}), object_item("c", 1),
                                        float_shard("a", {4}, {1}, {2})};
  const auto refused = planned(maker, wanted);
  EXPECT_CODE(refused, StatusCode::kNotFound);
  EXPECT_EQ(refused.status().message(), "'b' is not in the checkpoint");
  ASSERT_OK_AND_ASSIGN(const ReadPlan plan, planned(maker, wanted, true));
  ASSERT_EQ(plan.reads().size(), 1u);
  EXPECT_EQ(plan.reads()[0].item, 2);
}

TEST(ReadPlanTest, OtherSizesAreAMismatchEvenInPart) {
  IndexMaker maker;
  maker.add_whole("a", {4, 6});
  for (const Dims& sizes : {Dims{4, 7}, Dims{6, 4}, Dims{24}, Dims{}, Dims{4, 6, 1}, Dims{0, 6}}) {
    const auto refused = planned(maker, {whole_item("a", float_facts(sizes))}, true);
    EXPECT_CODE(refused, StatusCode::kMismatch);
    EXPECT_EQ(refused.status().message(),
              "'a' is stored in sizes [4, 6], and wanted in " + to_string(sizes));
  }
}

TEST(ReadPlanTest, AnObjectIsNoTensor) {
  IndexMaker maker;
  maker.add_whole("a", {});
  maker.add_object("o");
  const auto refused = planned(maker, {object_item("a", 5)});
  EXPECT_CODE(refused, StatusCode::kMismatch);
  EXPECT_THAT(refused.status().message(), HasSubstr("'a' is stored as a tensor"));
  // Whoever wants a tensor may be able to use an object, as with DCP.
  ASSERT_OK_AND_ASSIGN(const ReadPlan plan, planned(maker, {whole_item("o", float_facts({2}))}));
  ASSERT_EQ(plan.reads().size(), 1u);
  EXPECT_TRUE(plan.reads()[0].is_object);
  EXPECT_EQ(plan.file(plan.reads()[0].place.file), "__1_0.distcp");
}

TEST(ReadPlanTest, ABoxOutsideItsTensorIsRefusedUnlessItIsEmpty) {
  IndexMaker maker;
  maker.add_whole("a", {4, 6});
  IndexedEntry& halves = maker.add("h", float_facts({4, 6}));
  maker.add_box(halves, {0, 0}, {2, 6});
  maker.add_box(halves, {2, 0}, {2, 6});
  for (const char* fqn : {"a", "h"}) {
    const auto refused = planned(maker, {float_shard(fqn, {4, 6}, {3, 0}, {2, 6})});
    EXPECT_CODE(refused, StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.status().message(), HasSubstr("is wanted at [3:5, 0:6]"));
    ASSERT_OK_AND_ASSIGN(const ReadPlan plan,
                         planned(maker, {float_shard(fqn, {4, 6}, {9, 0}, {0, 6})}));
    EXPECT_TRUE(plan.reads().empty());
  }
}

TEST(ReadPlanTest, AnEmptyBoxIsNotReadThoughItsOffsetsAreInside) {
  IndexMaker maker;
  IndexedEntry& entry = maker.add("a", float_facts({4}));
  maker.add_box(entry, {0}, {0});
  maker.add_box(entry, {0}, {4});
  ASSERT_OK_AND_ASSIGN(const ReadPlan plan, planned(maker, {float_shard("a", {4}, {0}, {4})}));
  ASSERT_EQ(plan.reads().size(), 1u);
  EXPECT_EQ(plan.reads()[0].box, 1);
}

TEST(ReadPlanTest, AHoleThatAnOverlapMakesUpForIsFound) {
  IndexMaker maker;
  IndexedEntry& entry = maker.add("a", float_facts({6}));
  maker.add_box(entry, {0}, {3});
  maker.add_box(entry, {2}, {2});
  maker.add_box(entry, {5}, {1});
  const auto overlap = planned(maker, {whole_item("a", float_facts({6}))});
  EXPECT_CODE(overlap, StatusCode::kCorruption);
  EXPECT_EQ(overlap.status().message(),
            "cannot load [0:6] of 'a': different stored boxes contain [2:3]");
  const auto hole = planned(maker, {float_shard("a", {6}, {3}, {3})});
  EXPECT_CODE(hole, StatusCode::kMismatch);
  EXPECT_EQ(hole.status().message(), "cannot load [3:6] of 'a': no stored box contains [4:5]");
}

TEST(ReadPlanTest, OfEqualBoxesTheFirstOneIsRead) {
  IndexMaker maker;
  IndexedEntry& entry = maker.add("a", float_facts({6}));
  maker.add_box(entry, {0}, {3});
  maker.add_box(entry, {0}, {3});
  maker.add_box(entry, {3}, {3});
  ASSERT_OK_AND_ASSIGN(const ReadPlan plan, planned(maker, {whole_item("a", float_facts({6}))}));
  ASSERT_EQ(plan.reads().size(), 2u);
  EXPECT_EQ(plan.reads()[0].box, 0);
  EXPECT_EQ(plan.reads()[1].box, 2);
}

TEST(ReadPlanTest, ADamagedIndexIsCorruption) {
  IndexMaker maker;
  maker.add_whole("a", {4});
  std::vector<std::byte> bytes = written(maker.index());
  bytes.back() ^= std::byte{1};
  ASSERT_OK_AND_ASSIGN(const auto stored, opened(bytes));
  const ItemTable table = table_of({float_shard("a", {4}, {0}, {4})});
  EXPECT_CODE(ReadPlan::make(*stored, table, true), StatusCode::kCorruption);
}

}  // namespace
}  // namespace torch_ckpt::read_plan_test
