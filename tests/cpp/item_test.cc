#include "plan/item.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt::item_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

TEST(ItemTableTest, RandomItemsAreThereInOrder) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::vector<PlanItem> items = random_items(random, pick(random, 60));
    ASSERT_EQ(items_of(table_of(items)), items);
  }
}

TEST(ItemTableTest, EntriesAreNumberedByTheirFirstItems) {
  const ItemTable table = table_of({object_item("b", 1), float_shard("a", {4}, {0}, {2}),
                                    object_item("b", 2), float_shard("a", {4}, {2}, {2})});
  ASSERT_EQ(table.entries().size(), 2);
  EXPECT_EQ(table.entries().fqn(0), "b");
  EXPECT_EQ(table.entries().fqn(1), "a");
  EXPECT_EQ(table.entries().find("a"), 1);
  EXPECT_EQ(table.entries().find("c"), -1);
  EXPECT_EQ(table.entry(3), 1);
  EXPECT_EQ(table.entry(2), 0);
}

TEST(ItemTableTest, FactsThatTensorsShareAreKeptOnce) {
  const ItemTable table =
      table_of({float_shard("a", {4}, {0}, {2}), float_shard("b", {4}, {0}, {4}),
                float_shard("c", {5}, {0}, {4}), object_item("d", 1), object_item("e", 1)});
  EXPECT_EQ(table.entries().all_facts().size(), 3u);
}

TEST(ItemTableTest, BytesAreThoseOfTheBox) {
  const ItemTable table =
      table_of({float_shard("a", {4, 6}, {1, 0}, {2, 6}), whole_item("b", float_facts({}))});
  EXPECT_EQ(table.nbytes(0), 48);
  EXPECT_EQ(table.nbytes(1), 4);
}

// Each is refused with a reason, and leaves the table as it was.
TEST(ItemTableTest, WhatCannotBeIsRefusedByName) {
  Facts without_dtype = float_facts({4});
  without_dtype.dtype = "";
  Facts without_bytes = float_facts({4});
  without_bytes.itemsize = 0;
  Facts other_dtype = float_facts({4});
  other_dtype.dtype = "int32";
  const auto one = Dims{1};
  const struct {
    PlanItem item;
    const char* reason;
  } cases[] = {
      {{"w", float_facts({4}), ItemKind::kShard, {{0}, {2, 2}}, 0}, "1 offsets and 2 sizes"},
      {{"w", float_facts({4}), ItemKind::kShard, {{}, {}}, 0}, "0 offsets and 0 sizes"},
      {{"w", float_facts({4}), ItemKind::kShard, {{-1}, {2}}, 0}, "offsets [-1]"},
      {{"w", float_facts({4}), ItemKind::kShard, {{0}, {-2}}, 0}, "sizes [-2]"},
      {{"w", float_facts({4}), ItemKind::kShard, {{kHuge}, {1}}, 0}, "offsets"},
      {{"w", float_facts({4}), ItemKind::kShard, {{0}, {kHuge}}, 0}, "too large"},
      {{"w", float_facts({kHuge}), ItemKind::kShard, {{0}, one}, 0}, "too large"},
      {{"w", float_facts({-4}), ItemKind::kShard, {{0}, one}, 0}, "negative"},
      {{"w", without_dtype, ItemKind::kShard, {{0}, one}, 0}, "do not name"},
      {{"w", without_bytes, ItemKind::kShard, {{0}, one}, 0}, "0 bytes"},
      {{"w", float_facts(Dims(65)), ItemKind::kShard, {Dims(65), Dims(65)}, 0}, "65 dimensions"},
      {{"w", Facts{}, ItemKind::kShard, {}, 0}, "not a tensor"},
      {object_item("w", -1), "-1 bytes"},
      {whole_item("there", other_dtype), "float32"},
      {object_item("there", 1), "as a tensor and as an object"},
  };
  ItemTable table = table_of({whole_item("there", float_facts({4}))});
  for (const auto& [item, reason] : cases) {
    const Status status = add_item(item, &table);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << reason;
    EXPECT_THAT(status.message(), HasSubstr(reason));
    EXPECT_THAT(status.message(), HasSubstr("cannot plan '" + item.fqn + "': "));
    EXPECT_EQ(table.size(), 1);
    EXPECT_EQ(table.entries().size(), 1);
  }
}

}  // namespace
}  // namespace torch_ckpt::item_test
