#include "plan/plan_wire.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "support/damaged_frame.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt::plan_wire_test {
namespace {

ItemTable sample() {
  Facts half = float_facts({8, 6});
  half.dtype = "bfloat16";
  half.itemsize = 2;
  half.requires_grad = true;
  half.is_opaque = true;
  return table_of({shard_item("model.a", half, {4, 0}, {4, 6}), object_item("step", 100),
                   shard_item("model.a", half, {0, 0}, {4, 3}), whole_item("model.ab", half),
                   shard_item("model.ab", half, {2, 0}, {900, 6}),
                   whole_item("scalar", float_facts({})),
                   float_shard("deep", Dims(16, 2), Dims(16, 0), [] {
                     Dims sizes(16, 2);
                     sizes.back() = 1;
                     return sizes;
                   }())});
}

TEST(PlanWireTest, RandomTablesSurviveTheWire) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::vector<PlanItem> items = random_items(random, pick(random, 80));
    const std::vector<std::byte> bytes = encode(table_of(items));
    ASSERT_OK_AND_ASSIGN(const ItemTable table, decode(bytes));
    ASSERT_EQ(items_of(table), items);
    ASSERT_EQ(encode(table), bytes);
  }
}

TEST(PlanWireTest, TheSameEntriesAreTheSameBytesWhateverTheBoxes) {
  const auto of_rank = [](int64_t rank) {
    return encode(table_of(
        {float_shard("a", {8, 6}, {4 * rank, 0}, {4, 6}), float_shard("b", {8}, {4 * rank}, {4})}));
  };
  const auto bytes = std::vector{of_rank(0), of_rank(1)};
  ASSERT_OK_AND_ASSIGN(const PlanSections a, open_plan(bytes[0]));
  ASSERT_OK_AND_ASSIGN(const PlanSections b, open_plan(bytes[1]));
  EXPECT_EQ(as_text(a.entries), as_text(b.entries));
  EXPECT_NE(as_text(a.items), as_text(b.items));
}

TEST(PlanWireTest, AShardedMatrixTakesAtMostTwelveBytesBesidesItsName) {
  ItemTable table;
  for (int64_t i = 0; i < 1000; ++i) {
    ASSERT_OK(add_item(float_shard("layers." + std::to_string(i) + ".weight", {131072, 8192},
                                   {511 * 256, 0}, {256, 8192}),
                       &table));
  }
  const std::vector<std::byte> bytes = encode(table);
  ASSERT_OK_AND_ASSIGN(const PlanSections parts, open_plan(bytes));
  EXPECT_LE(parts.items.size(), 12u * 1000);
  EXPECT_LE(parts.entries.size(), 16u * 1000);
}

ItemTable sample_with_replicas() {
  std::vector<PlanItem> items = items_of(sample());
  for (const size_t item : {0, 2, 3, 5}) items[item].replica = item == 5 ? 300 : 4;
  return table_of(items);
}

TEST(PlanWireTest, TheSameItemsOfOtherReplicasAreTheSameBytesButForTheirNames) {
  const auto bytes = std::vector{encode(sample()), encode(sample_with_replicas())};
  ASSERT_OK_AND_ASSIGN(const PlanSections without, open_plan(bytes[0]));
  ASSERT_OK_AND_ASSIGN(const PlanSections with, open_plan(bytes[1]));
  EXPECT_EQ(as_text(without.listed), as_text(with.listed));
  EXPECT_TRUE(without.replicas.empty());
  EXPECT_EQ(with.replicas.size(), 11u);  // Five runs, of which one has a number of two bytes.
}

TEST(PlanWireTest, ReplicasOfItemsThatAreNotThereAreCorruption) {
  const auto parsed = [](const std::vector<int64_t>& numbers) {
    WireWriter out;
    for (const int64_t number : numbers) out.varint(number);
    return parse_replicas(out.bytes(), 3).status();
  };
  EXPECT_OK(parsed({}));
  EXPECT_OK(parsed({3, 1}));
  EXPECT_OK(parsed({1, 0, 1, int64_t{0x7FFFFFFF}}));
  for (const auto& numbers : std::vector<std::vector<int64_t>>{
           {4, 1}, {2, 1, 2, 1}, {0, 1}, {1}, {1, 0}, {1, 5, 1, 0}, {1, int64_t{0x80000000}}}) {
    EXPECT_CODE(parsed(numbers), StatusCode::kCorruption);
  }
}

TEST(PlanWireTest, AnyDamageIsRefused) {
  expect_damage_is_refused(encode(sample()), decode);
  expect_damage_is_refused(encode(sample_with_replicas()), decode);
}

TEST(PlanWireTest, NoSealedNonsenseIsBelieved) {
  for (const ItemTable& table : {sample(), sample_with_replicas()}) {
    expect_nonsense_is_refused(encode(table), decode,
                               [](const ItemTable& read, const std::vector<std::byte>&) {
                                 // Adding checks everything, so a table that can be built again is
                                 // sound.
                                 ASSERT_EQ(items_of(table_of(items_of(read))), items_of(read));
                               });
  }
}

TEST(PlanWireTest, NamesThatWouldGrowTooMuchAreWrittenInFull) {
  ItemTable table;
  const std::string prefix(10000, 'x');
  for (int64_t i = 0; i < 500; ++i) {
    ASSERT_OK(table.add_object(prefix + std::to_string(i), 1));
  }
  const std::vector<std::byte> bytes = encode(table);
  EXPECT_LT(table.entries().fqn_nbytes(), (kMaxTextGrowth + 1) * std::ssize(bytes));
  EXPECT_LT(std::ssize(bytes), table.entries().fqn_nbytes() / 10);
  ASSERT_OK_AND_ASSIGN(const ItemTable read, decode(bytes));
  EXPECT_EQ(items_of(read), items_of(table));
}

TEST(PlanWireTest, AnUnknownFlagIsCorruption) {
  for (const uint8_t flags : {9, 15, 16, 17, 32, 129}) {
    WireWriter entries;
    entries.varint(1);
    entries.byte(flags);
    entries.varint(4);
    entries.word("float32");
    entries.word("contiguous_format");
    entries.varint(0);
    entries.varint(0);
    EXPECT_CODE(parse_entries(entries.bytes()),
                flags < 16 ? StatusCode::kOk : StatusCode::kCorruption);
  }
}

TEST(PlanWireTest, FewBytesCannotAskForMuchText) {
  WireWriter entries;
  entries.varint(1);
  entries.byte(0);
  entries.varint(1001);
  entries.varint(0);
  entries.word(std::string(1000, 'x'));
  entries.varint(0);
  for (int i = 0; i < 1000; ++i) {
    entries.varint(1000 + i);
    entries.word("y");
    entries.varint(0);
  }
  EXPECT_CODE(parse_entries(entries.bytes()), StatusCode::kCorruption);
}

}  // namespace
}  // namespace torch_ckpt::plan_wire_test
