#include "plan/own_share.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/worlds.h"

namespace torch_ckpt::own_share_test {
namespace {

// What a rank copies, as items.
Result<std::vector<PlanItem>> copied(const std::vector<PlanItem>& items,
                                     const Assignment& of_tensors) {
  const ItemTable table = table_of(items);
  ASSIGN_OR_RETURN(const Assignment own, own_share(table, of_tensors));
  ASSIGN_OR_RETURN(const ItemTable out, assigned_items(table, own));
  return items_of(out);
}

const PlanItem kW = whole_item("w", float_facts({8, 2}));
const PlanItem kB = whole_item("b", float_facts({8}));
const PlanItem kC = whole_item("c", float_facts({3}));
const PlanItem kStep = object_item("step", 10);
const PlanItem kEpoch = object_item("epoch", 10);

TEST(OwnShareTest, ARankCopiesItsShareOfTensorsAndAllItsObjects) {
  const struct {
    std::vector<PlanItem> items;
    Assignment of_tensors;
    std::vector<PlanItem> copied;
  } cases[] = {
      {{kStep, kW, kB},
       {2, {{0, 1}}, {{0, 2, 4}}},
       {kStep, float_shard("w", {8, 2}, {2, 0}, {4, 2})}},
      {{kW, kStep, kB, kEpoch, kC}, {3, {{0, 1}, {2, 1}}, {}}, {kW, kStep, kEpoch, kC}},
      {{kW, kStep, kB}, {2, {{0, 2}}, {}}, {kW, kStep, kB}},
      {{kW, kB}, {2, {{1, 1}}, {}}, {kB}},
      {{kStep, kW}, {1, {}, {}}, {kStep}},
      {{kStep, kEpoch}, {0, {}, {}}, {kStep, kEpoch}},
  };
  for (const auto& [items, of_tensors, expected] : cases) {
    ASSERT_OK_AND_ASSIGN(const auto found, copied(items, of_tensors));
    EXPECT_EQ(found, expected);
  }
}

TEST(OwnShareTest, AShareOfOtherTensorsIsRefused) {
  EXPECT_CODE(copied({kW, kStep}, {2, {{0, 2}}, {}}).status(), StatusCode::kCorruption);
  EXPECT_CODE(copied({kW}, {1, {{0, 1}}, {{0, 7, 2}}}).status(), StatusCode::kCorruption);
}

// By FQN: the bytes of the boxes that a plan stores.
std::map<std::string, int64_t> stored_nbytes(const GlobalPlan& plan) {
  std::map<std::string, int64_t> out;
  const StoredTable& stored = plan.stored();
  for (int64_t entry = 0; entry < stored.entries().size(); ++entry) {
    const Facts& facts = stored.entries().facts(entry);
    if (!facts.is_tensor) continue;
    int64_t& nbytes = out[std::string(stored.entries().fqn(entry))];
    for (int64_t i = stored.first_box(entry); i < stored.first_box(entry + 1); ++i) {
      nbytes += *checked_volume(stored.box(entry, i).sizes) * facts.itemsize;
    }
  }
  return out;
}

TEST(OwnShareTest, OnRandomMeshesTheSharesOfAllMakeUpEverythingOnce) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const World world = random_world(random);
    World tensors;
    for (const auto& items : world) tensors.push_back(items_of(tensors_of(table_of(items))));
    ASSERT_OK_AND_ASSIGN(const GlobalPlan shared, plan(tensors, {.whole = false}));
    World shares;
    for (size_t rank = 0; rank < world.size(); ++rank) {
      ASSERT_OK_AND_ASSIGN(
          const Assignment of_tensors,
          decode_assignment(encode(shared.assignment(static_cast<int64_t>(rank)))));
      ASSERT_OK_AND_ASSIGN(shares.emplace_back(), copied(world[rank], of_tensors));
    }
    ASSERT_OK_AND_ASSIGN(const GlobalPlan all, plan(world));
    ASSERT_OK_AND_ASSIGN(const GlobalPlan of_shares, plan(shares));
    ASSERT_EQ(stored_nbytes(of_shares), stored_nbytes(all));
    std::vector<int64_t> held;
    for (const auto& share : shares) {
      int64_t& nbytes = held.emplace_back(0);
      for (const PlanItem& item : share) nbytes += item.kind == ItemKind::kObject ? 0 : item.nbytes;
    }
    ASSERT_EQ(held, shared.load());
  }
}

}  // namespace
}  // namespace torch_ckpt::own_share_test
