#include "engine/save/planned_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plan/item_extents.h"
#include "support/frame_sum.h"
#include "support/opened_index.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/worlds.h"

namespace torch_ckpt::planned_index_test {
namespace {

using ::testing::HasSubstr;

// A data file as its rank fills it.
struct File {
  int64_t rank = 0;
  IndexedFile file;
  std::vector<ItemExtent> extents;
};

File file_of(int64_t rank, int64_t number) {
  File out;
  out.rank = rank;
  out.file.name = "__" + std::to_string(rank) + "_" + std::to_string(number) + ".distcp";
  return out;
}

// Appends an item behind all others.
void store(int64_t item, int64_t nbytes, bool plain, File* file) {
  int64_t& end = file->file.sums.file_nbytes;
  file->extents.push_back({item, end, nbytes, plain});
  end += nbytes;
  const int64_t blocks = BlockGrid::block_count(end, kSumBlockNbytes);
  file->file.sums.sums.resize(static_cast<size_t>(blocks), 17);
}

Result<Index> index_of(const GlobalPlan& global, const std::vector<File>& files) {
  std::vector<std::vector<std::byte>> encoded;
  for (const File& file : files) encoded.push_back(encode(file.extents));
  std::vector<RankFile> reported;
  for (size_t i = 0; i < files.size(); ++i) {
    reported.push_back({files[i].rank, files[i].file, encoded[i], {}});
  }
  return planned_index(global.stored(), std::move(reported));
}

IndexedEntry entry_of(const PlanItem& item) {
  return {.fqn = item.fqn,
          .is_tensor = item.facts.is_tensor,
          .dtype = item.facts.dtype,
          .memory_format = item.facts.memory_format,
          .requires_grad = item.facts.requires_grad,
          .pin_memory = item.facts.pin_memory,
          .sizes = item.facts.sizes};
}

// What each rank writes by its assignment, in up to three files of its own and in any order; and
// the index of that.
std::pair<std::vector<File>, Index> written_by(const World& world, const GlobalPlan& global,
                                               std::mt19937& random) {
  std::vector<File> files;
  Index index;
  index.has_entries = true;
  std::map<std::string, size_t> entries;
  for (const auto& items : world) {
    for (const PlanItem& item : items) {
      if (!entries.emplace(item.fqn, index.entries.size()).second) continue;
      index.entries.push_back(entry_of(item));
    }
  }
  for (int64_t rank = 0; rank < std::ssize(world); ++rank) {
    const auto first = files.size();
    for (int64_t i = 0; i <= pick(random, 3); ++i) files.push_back(file_of(rank, i));
    const Assignment assignment = global.assignment(rank);
    std::map<int64_t, Cut> cuts;
    for (const Cut& cut : assignment.cuts) cuts[cut.item] = cut;
    std::vector<int64_t> items;
    for (const Run& run : assignment.runs) {
      for (int64_t item = run.first; item < run.first + run.count; ++item) items.push_back(item);
    }
    for (const int64_t item : items) {
      const PlanItem& planned = world[static_cast<size_t>(rank)][static_cast<size_t>(item)];
      const auto number = first + static_cast<size_t>(pick(
                                      random, std::ssize(files) - static_cast<int64_t>(first)));
      File& file = files[number];
      // Gaps, and items that others stand behind.
      file.file.sums.file_nbytes += pick(random, 100);
      Box box = planned.box;
      if (cuts.contains(item)) box = cut_box({planned.box.offsets, planned.box.sizes}, cuts[item]);
      const int64_t nbytes = planned.facts.is_tensor
                                 ? *checked_volume(box.sizes) * planned.facts.itemsize
                                 : int64_t{0};
      store(item, nbytes + 1 + pick(random, 5000), pick(random, 2) == 0, &file);
      const ItemExtent& extent = file.extents.back();
      index.entries[entries[planned.fqn]].boxes.push_back({box.offsets,
                                                           box.sizes,
                                                           static_cast<int64_t>(number),
                                                           extent.offset,
                                                           extent.nbytes,
                                                           extent.plain,
                                                           {}});
    }
    for (size_t i = first; i < files.size(); ++i) {
      std::reverse(files[i].extents.begin(), files[i].extents.end());
    }
  }
  for (const File& file : files) index.files.push_back(file.file);
  return {files, index};
}

TEST(PlannedIndexTest, OfRandomWorldsItIsWhatTheRanksHaveWritten) {
  int64_t boxes = 0;
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const World world = random_world(random);
    ASSERT_OK_AND_ASSIGN(const GlobalPlan global,
                         plan(world, {.ranks_per_node = 1 + pick(random, 4),
                                      .split = pick(random, 3) > 0,
                                      .dedup = pick(random, 5) > 0}));
    const auto [files, expected] = written_by(world, global, random);
    ASSERT_OK_AND_ASSIGN(Index index, index_of(global, files));
    ASSERT_EQ(index, expected);
    boxes += global.stored().box_count();

    index.save_id = "0123456789abcdef";
    ASSERT_OK_AND_ASSIGN(const Index read, opened(index)->read_all());
    ASSERT_EQ(read.entries, expected.entries);
  }
  EXPECT_GT(boxes, 5000);
}

TEST(PlannedIndexTest, APieceOfACutTensorIsWhereItsRankHasPutIt) {
  const World world(2, {whole_item("big", float_facts({4096, 1024}))});
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world));
  std::vector<File> files = {file_of(1, 0), file_of(0, 0)};
  store(0, 100, false, &files[0]);
  store(0, 200, false, &files[1]);
  ASSERT_OK_AND_ASSIGN(const Index index, index_of(global, files));
  EXPECT_EQ(index.entries[0].boxes,
            (std::vector<IndexedBox>{{{0, 0}, {2048, 1024}, 1, 0, 200, false, {}},
                                     {{2048, 0}, {2048, 1024}, 0, 0, 100, false, {}}}));
}

TEST(PlannedIndexTest, WithoutItemsThereAreFilesAlone) {
  ASSERT_OK_AND_ASSIGN(const GlobalPlan nobody, plan({}));
  ASSERT_OK_AND_ASSIGN(const Index empty, index_of(nobody, {}));
  EXPECT_TRUE(empty.has_entries && empty.files.empty() && empty.entries.empty());
  ASSERT_OK_AND_ASSIGN(const Index files, index_of(nobody, {file_of(0, 0)}));
  EXPECT_EQ(files.files.size(), 1u);
}

// Rank 0 writes items 0 and 2, rank 1 its item 1; its item 0 is a replica, its item 2 empty.
class PlannedIndexErrorTest : public ::testing::Test {
 protected:
  PlannedIndexErrorTest() {
    const World world = {
        {object_item("step", 10), float_shard("gone", {2}, {0}, {0}),
         float_shard("w", {4, 2}, {0, 0}, {2, 2})},
        {object_item("step", 10), float_shard("w", {4, 2}, {2, 0}, {2, 2}),
         float_shard("gone", {2}, {0}, {2}), float_shard("w", {4, 2}, {4, 0}, {0, 2})}};
    auto made = plan(world, {.dedup = false});
    EXPECT_OK(made);
    global_ = std::move(*made);
    files_ = {file_of(0, 0), file_of(1, 0), file_of(1, 1)};
    store(0, 10, false, &files_[0]);
    store(2, 700, true, &files_[0]);
    store(1, 700, true, &files_[1]);
    store(2, 600, true, &files_[2]);
  }

  void expect_error(const std::string& message) { expect_error(files_, message); }
  void expect_error(const std::vector<File>& files, const std::string& message) {
    const auto refused = index_of(global_, files);
    EXPECT_CODE(refused, StatusCode::kInternal) << message;
    EXPECT_EQ(refused.status().message(), "cannot commit: " + message);
  }

  GlobalPlan global_;
  std::vector<File> files_;
};

TEST_F(PlannedIndexErrorTest, WhatIsMissingOrTooMuchIsNamed) {
  const std::pair<std::function<void(std::vector<File>&)>, const char*> breaches[] = {
      {[](auto& files) { files[1].extents.clear(); },
       "the plan has 'w' at [2, 0], and rank 1 has not written it"},
      {[](auto& files) { files[0].extents.erase(files[0].extents.begin()); },
       "the plan has 'step' at [], and rank 0 has not written it"},
      {[](auto& files) { files.pop_back(); },
       "the plan has 'gone' at [0], and rank 1 has not written it"},
      {[](auto& files) { store(1, 700, true, &files[2]); },
       "rank 1 has written item 1 twice (__1_1.distcp)"},
      {[](auto& files) { files.push_back(files[0]); },
       "rank 0 has written item 0 twice (__0_0.distcp)"},
      {[](auto& files) { store(0, 10, false, &files[1]); },
       "rank 1 has written item 0, which is not its to write (__1_0.distcp)"},
  };
  EXPECT_OK(index_of(global_, files_));
  for (const auto& [breach, message] : breaches) {
    std::vector<File> files = files_;
    breach(files);
    expect_error(files, message);
  }
}

TEST_F(PlannedIndexErrorTest, AnItemThatNobodyHasIsRefused) {
  for (const int64_t item : {int64_t{3}, int64_t{4}, (int64_t{1} << 61) - 1}) {
    files_[1].extents = {{1, 0, 700, true}, {item, 700, 10, false}};
    expect_error("rank 1 has written item " + std::to_string(item) +
                 ", which is not its to write (__1_0.distcp)");
  }
}

TEST_F(PlannedIndexErrorTest, ARankThatNobodyIsIsRefused) {
  for (const int64_t rank : {int64_t{-1}, -(int64_t{1} << 40), int64_t{2}, int64_t{1} << 40}) {
    files_[2].rank = rank;
    expect_error("rank " + std::to_string(rank) +
                 " has written item 2, which is not its to write (__1_1.distcp)");
  }
}

TEST_F(PlannedIndexErrorTest, AReportThatCannotBeReadIsNamed) {
  std::vector<std::byte> odd = encode(files_[1].extents);
  odd.back() ^= std::byte{1};
  const RankFile bad = {1, files_[1].file, odd, {}};
  const auto refused = planned_index(global_.stored(), {bad});
  EXPECT_CODE(refused, StatusCode::kCorruption);
  EXPECT_THAT(refused.status().message(), HasSubstr("rank 1, __1_0.distcp: a list of extents of "));
  odd[4] = std::byte{2};
  fix_sums(&odd);
  EXPECT_CODE(planned_index(global_.stored(), {bad}), StatusCode::kUnsupported);
}

TEST(PlannedIndexTest, AFrameThatIsShorterThanItsBoxIsAnError) {
  const World world = {{float_shard("a", {8, 3}, {0, 0}, {8, 3})}};
  const auto global = plan(world);
  ASSERT_OK(global);
  File file = file_of(0, 0);
  store(0, 8 * 3 * 4, true, &file);
  EXPECT_OK(index_of(*global, {file}));
  File shorter = file_of(0, 0);
  store(0, 8 * 3 * 4 - 1, true, &shorter);
  EXPECT_THAT(index_of(*global, {shorter}).status().message(),
              HasSubstr("rank 0 has written 95 bytes of 'a' at [0, 0], which has more"));
}

}  // namespace
}  // namespace torch_ckpt::planned_index_test
