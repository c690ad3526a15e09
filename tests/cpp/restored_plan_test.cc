#include "engine/save/restored_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/save/planned_index.h"
#include "plan/item_extents.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/worlds.h"

namespace torch_ckpt {
namespace {

using ::testing::HasSubstr;

std::vector<int64_t> items_of(const Assignment& assignment) {
  std::vector<int64_t> out;
  for (const Run& run : assignment.runs) {
    for (int64_t item = run.first; item < run.first + run.count; ++item) out.push_back(item);
  }
  return out;
}

// The index of a save in which each rank reports these items, 64 bytes each, in one file.
Result<Index> saved(const StoredTable& stored, const std::vector<std::vector<int64_t>>& reported) {
  std::vector<std::vector<std::byte>> encoded;
  std::vector<RankFile> files;
  for (size_t rank = 0; rank < reported.size(); ++rank) {
    std::vector<ItemExtent> extents;
    for (const int64_t item : reported[rank])
      extents.push_back({item, 64 * std::ssize(extents), 64});
    IndexedFile file = {"__" + std::to_string(rank) + "_0_0123456789abcdef.distcp", {}};
    file.sums.file_nbytes = 64 * std::ssize(extents);
    file.sums.sums.resize(
        static_cast<size_t>(BlockGrid::block_count(file.sums.file_nbytes, kSumBlockNbytes)));
    encoded.push_back(encode(std::move(extents)));
    files.push_back({static_cast<int64_t>(rank), std::move(file), {}});
  }
  for (size_t i = 0; i < files.size(); ++i) files[i].extents = encoded[i];
  ASSIGN_OR_RETURN(Index index, planned_index(stored, std::move(files)));
  index.save_id = "0123456789abcdef";
  return index;
}

std::vector<std::vector<int64_t>> items_of_all(const GlobalPlan& global) {
  std::vector<std::vector<int64_t>> out;
  for (int64_t rank = 0; rank < global.rank_count(); ++rank) {
    out.push_back(items_of(global.assignment(rank)));
  }
  return out;
}

TEST(RestoredPlanTest, EveryRankFindsWhatItWasAssignedAndTheCoordinatorTheWhole) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const World world = random_world(random);
    const auto global = plan(world, {.split = pick(random, 2) == 0});
    ASSERT_OK(global);
    ASSERT_OK_AND_ASSIGN(const Index index, saved(global->stored(), items_of_all(*global)));
    ASSERT_OK_AND_ASSIGN(const auto bytes, write_index(index));
    ASSERT_OK_AND_ASSIGN(const auto opened, StoredIndex::in_memory(bytes));
    std::vector<std::vector<int64_t>> numbers;
    for (int64_t rank = 0; rank < std::ssize(world); ++rank) {
      const ItemTable table = table_of(world[static_cast<size_t>(rank)]);
      ASSERT_OK_AND_ASSIGN(const RestoredWork work, restore_work(*opened, table, rank));
      EXPECT_EQ(work.assignment, global->assignment(rank));
      EXPECT_OK(check_assignment(work.assignment, table));
      numbers.push_back(work.numbers);
    }
    // Whoever reports by these numbers has saved the same.
    ASSERT_OK_AND_ASSIGN(const StoredTable stored, restore_stored(*opened));
    EXPECT_EQ(stored.box_count(), global->stored().box_count());
    ASSERT_OK_AND_ASSIGN(const Index again, saved(stored, numbers));
    EXPECT_EQ(again, index);
  }
}

TEST(RestoredPlanTest, WhatIsInTheCheckpointOtherwiseIsNoPlan) {
  const World world = {{float_shard("a", {8, 3}, {0, 0}, {8, 3}), object_item("o", 9)}};
  const auto global = plan(world);
  ASSERT_OK(global);
  ASSERT_OK_AND_ASSIGN(Index index, saved(global->stored(), items_of_all(*global)));
  ASSERT_OK_AND_ASSIGN(const auto bytes, write_index(index));
  ASSERT_OK_AND_ASSIGN(const auto opened, StoredIndex::in_memory(bytes));
  const auto restored = [&](const PlanItem& item) {
    return restore_work(*opened, table_of({item}), 0).status();
  };
  EXPECT_OK(restored(world[0][0]));
  EXPECT_THAT(restored(float_shard("b", {8, 3}, {0, 0}, {8, 3})).message(),
              HasSubstr("'b' is not in the checkpoint"));
  EXPECT_THAT(restored(float_shard("a", {8, 4}, {0, 0}, {8, 4})).message(),
              HasSubstr("'a' is not what is in the checkpoint"));
  EXPECT_THAT(restored(object_item("a", 9)).message(), HasSubstr("'a' is not what"));
  PlanItem half = world[0][0];
  half.facts.dtype = "float16";
  EXPECT_THAT(restored(half).message(), HasSubstr("'a' is not what"));

  // Columns are nothing that a rank was ever given of an item.
  ASSERT_OK_AND_ASSIGN(
      const RestoredWork none,
      restore_work(*opened, table_of({float_shard("a", {8, 3}, {0, 0}, {8, 2})}), 0));
  EXPECT_TRUE(none.numbers.empty());

  index.files[0].name = "part.distcp";
  ASSERT_OK_AND_ASSIGN(const auto renamed, write_index(index));
  ASSERT_OK_AND_ASSIGN(const auto other, StoredIndex::in_memory(renamed));
  EXPECT_THAT(restore_stored(*other).status().message(),
              HasSubstr("part.distcp is not named by the rank that wrote it"));
  EXPECT_EQ(restore_work(*other, table_of(world[0]), 0).status().code(), StatusCode::kMismatch);
}

}  // namespace
}  // namespace torch_ckpt
