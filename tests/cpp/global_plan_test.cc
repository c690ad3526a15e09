#include "plan/global_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/worlds.h"

namespace torch_ckpt::global_plan_test {
namespace {

using ::testing::HasSubstr;

// A box that a rank writes: FQN, offsets, sizes, rank, item.
using Written = std::tuple<std::string, Dims, Dims, int64_t, int64_t>;

// By following the assignments, as ranks do.
std::multiset<Written> written_by_assignments(const World& world, const GlobalPlan& global) {
  std::multiset<Written> out;
  for (int64_t rank = 0; rank < std::ssize(world); ++rank) {
    const ItemTable table = table_of(world[static_cast<size_t>(rank)]);
    const auto sent = decode_assignment(encode(global.assignment(rank)));
    EXPECT_OK(sent);
    EXPECT_OK(check_assignment(*sent, table));
    std::map<int64_t, Cut> cuts;
    for (const Cut& cut : sent->cuts) cuts[cut.item] = cut;
    for (const Run& run : sent->runs) {
      for (int64_t item = run.first; item < run.first + run.count; ++item) {
        const auto cut = cuts.find(item);
        const Box box =
            cut == cuts.end() ? to_box(table.box(item)) : cut_box(table.box(item), cut->second);
        out.emplace(table.fqn(item), box.offsets, box.sizes, rank, item);
      }
    }
  }
  return out;
}

// As the table of stored boxes has it; checks its order as well.
std::multiset<Written> written_by_table(const GlobalPlan& global) {
  std::multiset<Written> out;
  const StoredTable& stored = global.stored();
  for (int64_t entry = 0; entry < stored.entries().size(); ++entry) {
    std::tuple<int32_t, int32_t, int64_t> former = {-1, -1, -1};
    for (int64_t i = stored.first_box(entry); i < stored.first_box(entry + 1); ++i) {
      const BoxView box = stored.box(entry, i);
      const auto order = std::tuple(stored.rank(i), stored.item(i),
                                    box.offsets.empty() ? int64_t{0} : box.offsets[0]);
      EXPECT_LT(former, order);
      former = order;
      out.emplace(stored.entries().fqn(entry), to_dims(box.offsets), to_dims(box.sizes),
                  stored.rank(i), stored.item(i));
    }
  }
  EXPECT_EQ(std::ssize(out), stored.box_count());
  return out;
}

// The oracle: of every FQN each different box that any rank has is written once, whole or in rows.
void expect_everything_once(const World& world, const GlobalPlan& global) {
  const std::multiset<Written> written = written_by_table(global);
  ASSERT_EQ(written_by_assignments(world, global), written);

  std::map<std::pair<std::string, Dims>, int64_t> wanted;  // Of each box how many elements.
  std::vector<std::string> order;
  for (const auto& items : world) {
    for (const PlanItem& item : items) {
      if (std::find(order.begin(), order.end(), item.fqn) == order.end()) order.push_back(item.fqn);
      const bool has_elements =
          item.kind == ItemKind::kObject || *checked_numel(item.box.sizes) > 0;
      if (has_elements) wanted[{item.fqn, item.box.offsets}] = *checked_numel(item.box.sizes);
    }
  }
  std::vector<int64_t> load(world.size());
  std::set<std::pair<std::string, Dims>> starts;
  for (const auto& [fqn, offsets, sizes, rank, number] : written) {
    ASSERT_TRUE(starts.emplace(fqn, offsets).second) << "two boxes of " << fqn << " begin alike";
    const PlanItem& item = world[static_cast<size_t>(rank)][static_cast<size_t>(number)];
    ASSERT_EQ(item.fqn, fqn);
    if (item.kind == ItemKind::kObject) {
      load[static_cast<size_t>(rank)] += item.nbytes;
      wanted[{fqn, {}}] -= 1;
      continue;
    }
    load[static_cast<size_t>(rank)] += *checked_numel(sizes) * item.facts.itemsize;
    ASSERT_EQ(Dims(sizes.begin() + (sizes.empty() ? 0 : 1), sizes.end()),
              Dims(item.box.sizes.begin() + (sizes.empty() ? 0 : 1), item.box.sizes.end()));
    if (*checked_numel(item.facts.sizes) > 0) {
      ASSERT_GT(*checked_numel(sizes), 0);
      wanted[{fqn, item.box.offsets}] -= *checked_numel(sizes);
    }
  }
  for (const auto& [box, left] : wanted) ASSERT_EQ(left, 0) << box.first;
  ASSERT_EQ(global.load(), load);
  std::vector<std::string> entries;
  for (int64_t i = 0; i < global.stored().entries().size(); ++i) {
    entries.emplace_back(global.stored().entries().fqn(i));
  }
  ASSERT_EQ(entries, order);
}

TEST(GlobalPlanTest, OnRandomMeshesEveryBoxIsWrittenOnce) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const World world = random_world(random);
    const GlobalPlanOptions options = {.ranks_per_node = 1 + pick(random, 4),
                                       .split = pick(random, 3) > 0,
                                       .dedup = pick(random, 5) > 0};
    ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world, options));
    ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, global));
    ASSERT_OK_AND_ASSIGN(const GlobalPlan again, plan(world, options));
    ASSERT_EQ(written_by_table(again), written_by_table(global));
  }
}

TEST(GlobalPlanTest, AReplicatedTensorIsCutAmongItsRanks) {
  const World world(4, {whole_item("big", float_facts({4096, 1024})), object_item("step", 10)});
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world));
  ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, global));
  EXPECT_EQ(global.stored().first_box(1), 4);
  for (int64_t rank = 0; rank < 4; ++rank) EXPECT_EQ(global.assignment(rank).cuts.size(), 1u);

  ASSERT_OK_AND_ASSIGN(const GlobalPlan whole, plan(world, {.split = false}));
  ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, whole));
  EXPECT_EQ(whole.stored().box_count(), 2);
}

TEST(GlobalPlanTest, OnlyReplicasThatAreKnownToBeEqualAreCut) {
  const PlanItem big = whole_item("big", float_facts({4096, 1024}));
  const World world(4, {object_item("step", 10), big, whole_item("bias", float_facts({3}))});
  const struct {
    Digests digests;
    size_t boxes;  // Of "big".
    std::vector<int32_t> others;
  } cases[] = {{{}, 4, {}},
               {{{0, 5, 1}, {0, 5, 1}, {0, 5, 1}, {0, 5, 1}}, 4, {}},
               {{{0, 5, 1}, {0, 5, 1}, {0, 6, 1}, {0, 5, 1}}, 1, {2}},
               {{{0, 5, 1}, {0, 7, 1}, {0, 6, 1}, {0, 5, 1}}, 1, {1, 2}},
               {{{0, 5, 1}, {0, 0, 1}, {0, 5, 1}, {0, 5, 1}}, 1, {}},
               {{{0, 0, 1}, {0, 5, 1}, {0, 6, 1}, {0, 5, 1}}, 1, {2}}};
  for (const auto& [digests, boxes, others] : cases) {
    for (const bool dedup : {true, false}) {
      ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world, {.dedup = dedup}, digests));
      ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, global));
      const auto stored = global.stored().first_box(2) - global.stored().first_box(1);
      EXPECT_EQ(static_cast<size_t>(stored), dedup ? boxes : 1u);
      ASSERT_EQ(global.differences().size(), others.empty() ? 0u : 1u);
      if (others.empty()) continue;
      EXPECT_EQ(global.differences()[0].fqn, "big");
      std::vector<RankPair> pairs;
      for (const int32_t other : others) pairs.push_back({digests[0][1] == 0 ? 1 : 0, other});
      EXPECT_EQ(global.differences()[0].pairs, pairs);
      EXPECT_EQ(global.differences()[0].pair_count, std::ssize(others));
    }
  }
}

// Ranks that write the boxes of a tensor, in the order of StoredTable.
std::vector<int32_t> writers_of(const GlobalPlan& global, const std::string& fqn) {
  const StoredTable& stored = global.stored();
  std::vector<int32_t> out;
  for (int64_t entry = 0; entry < stored.entries().size(); ++entry) {
    if (stored.entries().fqn(entry) != fqn) continue;
    for (int64_t i = stored.first_box(entry); i < stored.first_box(entry + 1); ++i) {
      out.push_back(stored.rank(i));
    }
  }
  return out;
}

TEST(GlobalPlanTest, ATensorWhoseReplicasMayDifferIsWrittenFromOneReplica) {
  const Facts facts = float_facts({4096, 1024});
  const auto half = [&](int64_t first) { return shard_item("w", facts, {first, 0}, {2048, 1024}); };
  const PlanItem more = whole_item("more", float_facts({8192, 1024}));
  // Replicas {0, 1} and {2, 3}. Rank 0 has more to write, so rank 2 would write its box.
  const World shards = {{more, half(0)}, {half(2048)}, {half(0)}, {half(2048)}};
  // Rank 1 has both boxes.
  const World alone = {{half(0)}, {half(0), half(2048)}, {half(2048)}};
  const struct {
    const World& world;
    Digests digests;
    std::vector<int32_t> writers;
    std::vector<RankPair> pairs;
  } cases[] = {{shards, {{9, 1}, {2}, {5}, {6}}, {0, 1}, {{0, 2}, {1, 3}}},
               {shards, {{9, 1}, {2}, {1}, {6}}, {0, 1}, {{1, 3}}},
               {shards, {{9, 0}, {0}, {0}, {0}}, {2, 3}, {}},
               {shards, {{9, 0}, {2}, {5}, {2}}, {2, 3}, {}},
               {alone, {{1}, {5, 2}, {2}}, {1, 1}, {{0, 1}}}};
  for (const auto& [world, digests, writers, pairs] : cases) {
    ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world, {}, digests));
    ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, global));
    EXPECT_EQ(writers_of(global, "w"), writers);
    ASSERT_EQ(global.differences().size(), pairs.empty() ? 0u : 1u);
    if (!pairs.empty()) {
      EXPECT_EQ(global.differences()[0].pairs, pairs);
    }
  }
}

// Of three tensors on a mesh of replicas and shards, the values of one differ, those of another one
// are unknown, and those of the last one are equal. Ranks are in any order.
TEST(GlobalPlanTest, TheReplicasOfAMeshAreFoundByTheNamesThatItsItemsGiveThem) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const int64_t replicas = 1 + pick(random, 4);
    const int64_t shards = 1 + pick(random, 4);
    std::vector<int32_t> mesh(static_cast<size_t>(replicas * shards));
    std::iota(mesh.begin(), mesh.end(), 0);
    std::shuffle(mesh.begin(), mesh.end(), random);
    World world(mesh.size());
    Digests digests(mesh.size());
    std::vector<int64_t> replica_of(mesh.size());
    const Dims sizes = {1 + pick(random, 9), 3};  // Some shards may be empty.
    for (int64_t replica = 0; replica < replicas; ++replica) {
      const auto row = std::span(mesh).subspan(static_cast<size_t>(replica * shards),
                                               static_cast<size_t>(shards));
      for (size_t shard = 0; shard < row.size(); ++shard) {
        const auto rank = static_cast<size_t>(row[shard]);
        replica_of[rank] = replica;
        const auto [begin, rows] = chunk_of(sizes[0], shards, static_cast<int64_t>(shard));
        for (const char* fqn : {"different", "unknown", "equal"}) {
          world[rank].push_back(float_shard(fqn, sizes, {begin, 0}, {rows, 3}));
          world[rank].back().replica = *std::min_element(row.begin(), row.end());
        }
        digests[rank] = {static_cast<uint64_t>(replica + 1), 0, 1};
        if (pick(random, 2) == 0) continue;
        world[rank].push_back(object_item("own." + std::to_string(rank), pick(random, 100)));
        digests[rank].push_back(0);
      }
    }
    for (const bool dedup : {true, false}) {
      ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world, {.dedup = dedup}, digests));
      ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, global));
      ASSERT_EQ(global.differences().size(), replicas > 1 ? 1u : 0u);
      for (const int32_t rank : writers_of(global, "different")) {
        ASSERT_EQ(replica_of[static_cast<size_t>(rank)], replica_of[0]);
      }
      const auto writers = writers_of(global, "unknown");
      for (const int32_t rank : writers) {
        if (writers.size() == 1) break;
        ASSERT_EQ(replica_of[static_cast<size_t>(rank)],
                  replica_of[static_cast<size_t>(writers[0])]);
      }
    }
  }
}

TEST(GlobalPlanTest, RanksThatNameNoReplicaAreMatchedByTheirOrderBesideThoseThatDo) {
  const auto half = [](int64_t first, int32_t replica) {
    PlanItem item = float_shard("w", {4, 3}, {first, 0}, {2, 3});
    item.replica = replica;
    return std::vector{item};
  };
  const World world = {half(0, -1), half(2, -1), half(2, 2), half(2, 3), half(0, 3), half(0, 2)};
  // The values of the first half are equal. Every rank of the other half has other values.
  const Digests digests = {{1}, {2}, {3}, {4}, {1}, {1}};
  ASSERT_OK_AND_ASSIGN(const GlobalPlan first, plan(world, {}, digests));
  EXPECT_EQ(writers_of(first, "w"), (std::vector<int32_t>{0, 1}));
  // If no replica has all boxes by name, the order of the ranks remains.
  const World others = {half(0, 7), half(2, 8), half(2, -1), half(0, 9)};
  ASSERT_OK_AND_ASSIGN(const GlobalPlan order, plan(others, {}, {{1}, {2}, {3}, {4}}));
  EXPECT_EQ(writers_of(order, "w").size(), 2u);
}

TEST(GlobalPlanTest, TwoRanksThatDifferInSeveralBoxesAreOnePair) {
  const Facts facts = float_facts({4, 3});
  const std::vector<PlanItem> items = {shard_item("w", facts, {0, 0}, {2, 3}),
                                       shard_item("w", facts, {2, 0}, {2, 3})};
  const World world(12, items);
  Digests digests;
  for (uint64_t rank = 0; rank < 12; ++rank) digests.push_back({rank + 1, rank + 1});
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world, {}, digests));
  ASSERT_EQ(global.differences().size(), 1u);
  EXPECT_EQ(global.differences()[0].pair_count, 11);
  EXPECT_EQ(global.differences()[0].pairs.size(), 8u);
}

// What is compared, found by looking at every box of every rank.
TEST(GlobalPlanTest, OnRandomMeshesReplicasAreComparedAsByLookingAtEveryRank) {
  using Place = std::pair<std::string, Dims>;  // Of a box: FQN and offsets.
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const World world = random_world(random);
    Digests digests;
    std::map<Place, std::vector<std::pair<int32_t, uint64_t>>> replicas;  // Ranks and digests.
    for (int32_t rank = 0; rank < std::ssize(world); ++rank) {
      digests.emplace_back();
      for (const PlanItem& item : world[static_cast<size_t>(rank)]) {
        const uint64_t digest = pick(random, 12) == 0 ? static_cast<uint64_t>(pick(random, 3)) : 1;
        digests.back().push_back(digest);
        if (item.kind == ItemKind::kObject) continue;
        const bool is_empty = *checked_numel(item.facts.sizes) == 0;
        if (is_empty || *checked_numel(item.box.sizes) == 0) continue;
        replicas[{item.fqn, item.box.offsets}].emplace_back(rank, digest);
      }
    }
    std::set<std::string> different;
    std::set<Place> equal;
    for (const auto& [place, of_ranks] : replicas) {
      std::set<uint64_t> values;
      for (const auto& [rank, digest] : of_ranks) values.insert(digest);
      if (of_ranks.size() == 1) continue;
      if (values.size() == 1 && !values.contains(0)) equal.insert(place);
      values.erase(0);
      if (values.size() > 1) different.insert(place.first);
    }
    ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world, {}, digests));
    std::set<std::string> found;
    for (const ReplicaDifference& difference : global.differences()) found.insert(difference.fqn);
    ASSERT_EQ(found, different);
    std::map<int32_t, std::vector<Place>> places_of_set;
    for (int32_t rank = 0; rank < std::ssize(world); ++rank) {
      std::map<int32_t, std::vector<Place>> own;
      for (const EqualReplicas& run : global.equal_replicas(rank)) {
        for (int64_t item = run.first; item < run.first + run.count; ++item) {
          const PlanItem& listed = world[static_cast<size_t>(rank)][static_cast<size_t>(item)];
          own[run.replica_set].emplace_back(listed.fqn, listed.box.offsets);
        }
      }
      for (const auto& [set, places] : own) {
        ASSERT_EQ(places_of_set.try_emplace(set, places).first->second, places);
        for (const Place& place : places) {
          ASSERT_TRUE(equal.contains(place));
          const auto& of_ranks = replicas[place];
          ASSERT_TRUE(std::ranges::any_of(of_ranks, [&](auto& r) { return r.first == rank; }));
        }
      }
    }
    size_t compared = 0;
    for (const auto& [set, places] : places_of_set) compared += places.size();
    ASSERT_EQ(compared, equal.size());
  }
}

TEST(GlobalPlanTest, DigestsThatAreNotOnesOfTheItemsAreRefused) {
  const World world(2, {whole_item("w", float_facts({3})), object_item("step", 10)});
  EXPECT_OK(plan(world, {}, {{1, 0}, {1, 0}}));
  EXPECT_CODE(plan(world, {}, {{1, 0}}), StatusCode::kCorruption);
  EXPECT_CODE(plan(world, {}, {{1, 0}, {1, 0}, {1, 0}}), StatusCode::kCorruption);
  EXPECT_CODE(plan(world, {}, {{1, 0}, {1}}), StatusCode::kCorruption);
}

TEST(GlobalPlanTest, WithoutDedupTheLowestRankWritesAReplica) {
  const World world(4, {whole_item("big", float_facts({4096, 1024})), object_item("step", 10)});
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world, {.dedup = false}));
  EXPECT_EQ(global.assignment(0), (Assignment{2, {{0, 2}}, {}}));
  EXPECT_EQ(global.assignment(3), (Assignment{2, {}, {}}));
}

TEST(GlobalPlanTest, SomeOfTheRanksNeedNotHoldAll) {
  const PlanItem piece = float_shard("w", {8, 2}, {2, 0}, {2, 2});
  const World world(2, {piece});
  EXPECT_CODE(plan(world).status(), StatusCode::kInvalidArgument);
  ASSERT_OK_AND_ASSIGN(const GlobalPlan some, plan(world, {.whole = false}));
  EXPECT_EQ(some.stored().box_count(), 1);
}

TEST(GlobalPlanTest, RanksWithoutReplicasWriteAllTheyHave) {
  World world;
  for (int64_t rank = 0; rank < 4; ++rank) {
    world.push_back({float_shard("w", {8, 2}, {2 * rank, 0}, {2, 2}),
                     object_item("rng." + std::to_string(rank), 50)});
  }
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world));
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(global.assignment(rank), (Assignment{2, {{0, 2}}, {}}));
  }
  EXPECT_EQ(global.load(), std::vector<int64_t>(4, 66));
}

TEST(GlobalPlanTest, ObjectsWithoutBytesAreNotAllForOneRank) {
  std::vector<PlanItem> items;
  for (int i = 0; i < 40; ++i) items.push_back(object_item(std::to_string(i), 0));
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(World(4, items)));
  for (int64_t rank = 0; rank < 4; ++rank) {
    int64_t written = 0;
    for (const auto& run : global.assignment(rank).runs) written += run.count;
    EXPECT_EQ(written, 10);
  }
}

TEST(GlobalPlanTest, EmptyShardsAreWrittenByNobodyAndEmptyTensorsOnce) {
  const World world = {
      {float_shard("w", {2}, {0}, {2}), float_shard("none", {0, 5}, {0, 0}, {0, 3})},
      {float_shard("w", {2}, {0}, {0}), float_shard("none", {0, 5}, {0, 3}, {0, 2})}};
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world));
  ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, global));
  EXPECT_EQ(global.assignment(0), (Assignment{2, {{0, 2}}, {}}));
  EXPECT_EQ(global.assignment(1), (Assignment{2, {}, {}}));
}

TEST(GlobalPlanTest, TheFirstRankSaysWhatOnlyDescribesATensor) {
  Facts trained = float_facts({4});
  trained.requires_grad = true;
  const World world = {{whole_item("w", trained)}, {whole_item("w", float_facts({4}))}};
  ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world));
  EXPECT_EQ(global.stored().entries().facts(0), trained);
}

// However large, and whatever the other ranks think that it is.
TEST(GlobalPlanTest, ATensorThatIsOpaqueOnAnyRankIsNeverCut) {
  const Facts plain = float_facts({4096, 1024});
  Facts opaque = plain;
  opaque.is_opaque = true;
  for (int64_t odd = 0; odd <= 4; ++odd) {
    World world(4, {whole_item("big", plain), object_item("step", 10)});
    for (int64_t rank = 0; rank < 4; ++rank) {
      if (rank == odd || odd == 4) world[static_cast<size_t>(rank)][0] = whole_item("big", opaque);
    }
    ASSERT_OK_AND_ASSIGN(const GlobalPlan global, plan(world));
    ASSERT_NO_FATAL_FAILURE(expect_everything_once(world, global));
    EXPECT_EQ(global.stored().box_count(), 2) << odd;
    EXPECT_TRUE(global.stored().entries().facts(0).is_opaque);
  }
}

TEST(GlobalPlanTest, WithoutRanksOrItemsThereIsNothingToWrite) {
  ASSERT_OK_AND_ASSIGN(const GlobalPlan nobody, plan({}));
  EXPECT_EQ(nobody.rank_count(), 0);
  EXPECT_EQ(nobody.stored().box_count(), 0);
  ASSERT_OK_AND_ASSIGN(const GlobalPlan idle, plan({{}, {}}));
  EXPECT_EQ(idle.assignment(1), Assignment{});
}

TEST(GlobalPlanTest, ARankAloneMaySavePartOfATensor) {
  const std::vector<PlanItem> part = {float_shard("w", {4}, {1}, {2})};
  EXPECT_OK(plan({part}));
  EXPECT_CODE(plan({part, part}), StatusCode::kInvalidArgument);
}

TEST(GlobalPlanTest, APlanThatIsNoneIsRefusedByRank) {
  const std::vector<std::byte> good = encode(table_of({object_item("a", 1)}));
  std::vector<std::byte> bad = good;
  bad[10] ^= std::byte{1};
  const auto refused = GlobalPlan::make({good, good, bad}, {});
  ASSERT_CODE(refused, StatusCode::kCorruption);
  EXPECT_THAT(refused.status().message(), HasSubstr("the plan of rank 2: "));
  EXPECT_CODE(GlobalPlan::make({good}, {.ranks_per_node = 0}), StatusCode::kInvalidArgument);
}

TEST(GlobalPlanTest, EachWayToDisagreeOrOverlapIsNamed) {
  Facts half = float_facts({6, 8});
  half.dtype = "bfloat16";
  half.itemsize = 2;
  Facts wide = float_facts({6, 8});
  wide.itemsize = 8;
  const auto shard = [](Dims offsets, Dims sizes) {
    return std::vector{float_shard("model.w", {6, 8}, std::move(offsets), std::move(sizes))};
  };
  const auto whole = [](Facts facts) {
    return std::vector{whole_item("model.w", std::move(facts))};
  };
  const std::vector<PlanItem> upper = shard({0, 0}, {3, 8});
  const std::vector<PlanItem> lower = shard({3, 0}, {3, 8});
  const auto both = [](std::vector<PlanItem> a, const std::vector<PlanItem>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  const struct {
    World world;
    StatusCode code;
    const char* message;
  } cases[] = {
      {{whole(float_facts({6, 8})), whole(half)},
       StatusCode::kMismatch,
       "rank 0 and rank 1 disagree on its dtype: float32 and bfloat16"},
      {{whole(float_facts({6, 8})), whole(wide)},
       StatusCode::kMismatch,
       "rank 0 and rank 1 disagree on its bytes an element: 4 and 8"},
      {{{}, whole(float_facts({6, 8})), {}, whole(float_facts({6, 9}))},
       StatusCode::kMismatch,
       "rank 1 and rank 3 disagree on its sizes: [6, 8] and [6, 9]"},
      {{whole(half), {object_item("model.w", 5)}},
       StatusCode::kMismatch,
       "it is a tensor on rank 0 and an object on rank 1"},
      {{upper, shard({3, 0}, {4, 8})},
       StatusCode::kInvalidArgument,
       "rank 1 would write the box [3:7, 0:8] outside of sizes [6, 8]"},
      {{shard({0, 0}, {4, 8}), {}, {}, shard({2, 0}, {4, 8})},
       StatusCode::kInvalidArgument,
       "rank 0 and rank 3 would write overlapping boxes [0:4, 0:8] and [2:6, 0:8] of sizes [6, 8]"},
      {{both(shard({2, 0}, {4, 8}), shard({0, 0}, {4, 8}))},
       StatusCode::kInvalidArgument,
       "rank 0 would write overlapping boxes [0:4, 0:8] and [2:6, 0:8] of sizes [6, 8]"},
      {{upper, shard({3, 0}, {3, 7})},
       StatusCode::kInvalidArgument,
       "the boxes of all ranks hold 45 of the 48 elements of sizes [6, 8]"},
      {{lower, both(upper, upper)},
       StatusCode::kInvalidArgument,
       "rank 1 would write the box [0:3, 0:8] twice"},
      {{{object_item("model.w", 5), object_item("model.w", 5)}},
       StatusCode::kInvalidArgument,
       "rank 0 would write it twice"},
  };
  for (const auto& [world, code, message] : cases) {
    const auto refused = plan(world);
    EXPECT_CODE(refused, code) << message;
    EXPECT_EQ(refused.status().message(), std::string("cannot plan 'model.w': ") + message);
  }
}

TEST(GlobalPlanTest, OfManyProblemsTheFirstFewAreListed) {
  World world(2);
  for (int i = 0; i < 100; ++i) {
    for (auto& items : world) {
      items.push_back(float_shard("w" + std::to_string(i), {4}, {0}, {1}));
    }
  }
  const auto refused = plan(world);
  ASSERT_CODE(refused, StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("cannot plan 'w7': "));
  EXPECT_THAT(refused.status().message(), Not(HasSubstr("cannot plan 'w8': ")));
  EXPECT_THAT(refused.status().message(), HasSubstr("; and perhaps more"));
}

// Boxes from a tiling or thrown at random: what is refused for overlap is what overlaps.
TEST(GlobalPlanTest, OverlapAndHolesAreFoundAsByLookingAtEveryElement) {
  int64_t sound = 0;
  for (uint32_t seed = 0; seed < 5000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Dims sizes = {1 + pick(random, 4), 1 + pick(random, 4), 1 + pick(random, 3)};
    std::set<std::pair<Dims, Dims>> boxes;
    const int64_t rows = 1 + pick(random, sizes[0]);
    for (int64_t i = 0; i < rows; ++i) {
      const auto [begin, length] = chunk_of(sizes[0], rows, i);
      const int64_t columns = 1 + pick(random, sizes[1]);
      for (int64_t k = 0; k < columns; ++k) {
        const auto [left, width] = chunk_of(sizes[1], columns, k);
        boxes.insert({{begin, left, 0}, {length, width, sizes[2]}});
      }
    }
    if (pick(random, 2) == 0) {
      Dims offsets(3);
      Dims local(3);
      for (size_t d = 0; d < 3; ++d) {
        offsets[d] = pick(random, sizes[d]);
        local[d] = 1 + pick(random, sizes[d] - offsets[d]);
      }
      if (pick(random, 2) == 0) boxes.erase(boxes.begin());
      boxes.insert({offsets, local});
    }
    World world(3);
    std::map<Dims, int> times;
    int64_t covered = 0;
    for (const auto& [offsets, local] : boxes) {
      world[static_cast<size_t>(pick(random, 3))].push_back(
          float_shard("w", sizes, offsets, local));
      for (int64_t e = 0; e < *checked_numel(local); ++e) {
        const Dims at = {offsets[0] + e / (local[1] * local[2]),
                         offsets[1] + e / local[2] % local[1], offsets[2] + e % local[2]};
        covered += ++times[at] == 1 ? 1 : 0;
      }
    }
    const bool once =
        std::all_of(times.begin(), times.end(), [](const auto& time) { return time.second == 1; });
    const auto planned = plan(world);
    if (once && covered == *checked_numel(sizes)) {
      ++sound;
      ASSERT_OK(planned);
    } else {
      ASSERT_CODE(planned, StatusCode::kInvalidArgument);
      ASSERT_THAT(planned.status().message(), HasSubstr(once ? "hold" : "overlapping"));
    }
  }
  EXPECT_GT(sound, 1000);
}

}  // namespace
}  // namespace torch_ckpt::global_plan_test
