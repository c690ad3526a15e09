#include "plan/kept_part.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/worlds.h"

namespace torch_ckpt {
namespace {

using testing::HasSubstr;

// What a rank keeps, as items. `other`: what another had.
Result<std::vector<PlanItem>> kept(const std::vector<PlanItem>& items,
                                   const std::vector<PlanItem>& former, const Assignment& part,
                                   const std::vector<PlanItem>& other = {}) {
  const ItemTable table = table_of(items);
  const ItemTable shared[] = {table_of(other), table_of(former)};
  ASSIGN_OR_RETURN(const Assignment assignment,
                   kept_part(table, {&shared[0], &shared[1]}, 1, part));
  ASSIGN_OR_RETURN(const ItemTable out, assigned_items(table, assignment));
  return items_of(out);
}

const PlanItem kW = whole_item("w", float_facts({8, 2}));
const PlanItem kB = whole_item("b", float_facts({8}));
const PlanItem kStep = object_item("step", 10);

TEST(KeptPartTest, ARankKeepsItsPartAndItsObjectsAndWhatIsNew) {
  const PlanItem added = whole_item("new", float_facts({3}));
  const PlanItem longer_b = whole_item("b", float_facts({9}));
  const PlanItem longer_w = whole_item("w", float_facts({9, 2}));
  const PlanItem other_shard = float_shard("b", {8}, {4}, {4});
  PlanItem trained = kW;  // What only describes a tensor makes it no other.
  trained.facts.requires_grad = true;
  trained.facts.pin_memory = true;
  const Assignment first = {2, {{0, 1}}, {}};
  const struct {
    std::vector<PlanItem> items;
    Assignment part;
    std::vector<PlanItem> other;
    std::vector<PlanItem> kept;
  } cases[] = {
      {{kStep, kW, kB},
       {2, {{0, 1}}, {{0, 2, 4}}},
       {},
       {kStep, float_shard("w", {8, 2}, {2, 0}, {4, 2})}},
      {{kW, kB}, {2, {{1, 1}}, {}}, {}, {kB}},
      {{added, kW, longer_b}, first, {}, {added, kW, longer_b}},
      {{kW, other_shard}, first, {}, {kW, other_shard}},
      {{kStep, longer_w}, first, {kB}, {kStep, longer_w}},  // Nobody else had "w".
      {{trained, kB}, first, {kW}, {trained}},
  };
  for (const auto& [items, part, other, expected] : cases) {
    ASSERT_OK_AND_ASSIGN(const auto found, kept(items, {kW, kB}, part, other));
    EXPECT_EQ(found, expected);
  }
}

TEST(KeptPartTest, WhatIsNewAndWasSharedByOthersIsTheirs) {
  const PlanItem added = whole_item("new", float_facts({3}));
  const ItemTable table = table_of({added, kW});
  const ItemTable shared[] = {table_of({kW}), table_of({added}), table_of({added})};
  const Assignment part = {1, {{0, 1}}, {}};
  ASSERT_OK_AND_ASSIGN(const Assignment of_two,
                       kept_part(table, {&shared[0], &shared[1], &shared[2]}, 0, part));
  EXPECT_EQ(of_two, (Assignment{2, {{1, 1}}, {}}));
  // One alone may have given it away.
  ASSERT_OK_AND_ASSIGN(const Assignment of_one,
                       kept_part(table, {&shared[0], &shared[1]}, 0, part));
  EXPECT_EQ(of_one, (Assignment{2, {{0, 2}}, {}}));
}

TEST(KeptPartTest, WhatWasToBeKeptForOthersIsMissed) {
  const Assignment part = {2, {{0, 1}}, {}};
  EXPECT_OK(kept({kW}, {kW, kB}, part, {kW, kB}));
  const auto lost = kept({kB}, {kW, kB}, part, {kW});
  EXPECT_CODE(lost.status(), StatusCode::kMismatch);
  EXPECT_THAT(lost.status().message(), HasSubstr("'w'"));
  EXPECT_CODE(kept({whole_item("w", float_facts({2, 8})), kB}, {kW, kB}, part, {kW}).status(),
              StatusCode::kMismatch);
}

TEST(KeptPartTest, APartOfOtherItemsIsRefused) {
  EXPECT_CODE(kept({kW}, {kW}, {2, {{0, 2}}, {}}).status(), StatusCode::kCorruption);
  EXPECT_CODE(kept({kW}, {kW}, {1, {{0, 1}}, {{0, 7, 2}}}).status(), StatusCode::kCorruption);
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

TEST(KeptPartTest, OnRandomMeshesThePartsOfAllMakeUpEverythingOnce) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const World world = random_world(random);
    World tensors;
    for (const auto& items : world) tensors.push_back(items_of(tensors_of(table_of(items))));
    ASSERT_OK_AND_ASSIGN(const GlobalPlan shared, plan(tensors, {.whole = false}));
    World parts;
    for (size_t rank = 0; rank < world.size(); ++rank) {
      ASSERT_OK_AND_ASSIGN(
          parts.emplace_back(),
          kept(world[rank], tensors[rank], shared.assignment(static_cast<int64_t>(rank))));
    }
    ASSERT_OK_AND_ASSIGN(const GlobalPlan all, plan(world));
    ASSERT_OK_AND_ASSIGN(const GlobalPlan of_parts, plan(parts));
    ASSERT_EQ(stored_nbytes(of_parts), stored_nbytes(all));
    std::vector<int64_t> held;
    for (const auto& part : parts) {
      int64_t& nbytes = held.emplace_back(0);
      for (const PlanItem& item : part) nbytes += item.kind == ItemKind::kObject ? 0 : item.nbytes;
    }
    ASSERT_EQ(held, shared.load());
  }
}

TEST(KeptPartTest, WhateverRanksHoldByThenIsThereOrMissed) {
  int missed = 0;
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const World before = random_world(random);
    std::vector<ItemTable> tables;
    World tensors;
    for (const auto& items : before) {
      tensors.push_back(items_of(tables.emplace_back(tensors_of(table_of(items)))));
    }
    std::vector<const ItemTable*> shared;
    for (const ItemTable& table : tables) shared.push_back(&table);
    ASSERT_OK_AND_ASSIGN(const GlobalPlan sharing, plan(tensors, {.whole = false}));

    // Some ranks lose tensors, get those of others, or new ones.
    World now = tensors;
    World parts;
    bool is_missed = false;
    for (size_t rank = 0; rank < now.size(); ++rank) {
      std::vector<PlanItem>& items = now[rank];
      if (pick(random, 2) == 0 && !items.empty()) {
        items.erase(items.begin() + pick(random, std::ssize(items)));
      }
      if (pick(random, 4) == 0) items.push_back(whole_item("new", float_facts({5, 3})));
      const auto& others = tensors[static_cast<size_t>(pick(random, std::ssize(tensors)))];
      if (pick(random, 2) == 0 && !others.empty()) {
        const PlanItem& item = others[static_cast<size_t>(pick(random, std::ssize(others)))];
        if (std::ranges::find(items, item) == items.end()) items.push_back(item);
      }
      ASSERT_OK_AND_ASSIGN(
          const Assignment part,
          decode_assignment(encode(sharing.assignment(static_cast<int64_t>(rank)))));
      const ItemTable table = table_of(items);
      const auto kept = kept_part(table, shared, rank, part);
      is_missed |= !kept.ok();
      if (!kept.ok()) continue;
      ASSERT_OK_AND_ASSIGN(const ItemTable assigned, assigned_items(table, *kept));
      parts.push_back(items_of(assigned));
    }
    missed += is_missed;
    if (is_missed) continue;
    ASSERT_OK_AND_ASSIGN(const GlobalPlan all, plan(now, {.whole = false}));
    ASSERT_OK_AND_ASSIGN(const GlobalPlan of_parts, plan(parts, {.whole = false}));
    for (const auto& [fqn, nbytes] : stored_nbytes(all)) {
      ASSERT_EQ(stored_nbytes(of_parts)[fqn], nbytes) << fqn;
    }
  }
  EXPECT_GT(missed, 100);
  EXPECT_LT(missed, 900);
}

}  // namespace
}  // namespace torch_ckpt
