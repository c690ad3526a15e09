#include "plan/plan_wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/xxh3.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt {
namespace {

ItemTable sample() {
  Facts half = float_facts({8, 6});
  half.dtype = "bfloat16";
  half.itemsize = 2;
  half.requires_grad = true;
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

// Makes the checksum true again.
void reseal(std::vector<std::byte>* bytes) {
  if (bytes->size() < sizeof(uint64_t)) return;
  const size_t end = bytes->size() - sizeof(uint64_t);
  store_le(bytes->data() + end, xxh3(Bytes(*bytes).first(end)));
}

TEST(PlanWireTest, RandomTablesSurviveTheWire) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::vector<PlanItem> items = random_items(random, below(random, 80));
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
  ASSERT_OK_AND_ASSIGN(const PlanParts a, open_plan(bytes[0]));
  ASSERT_OK_AND_ASSIGN(const PlanParts b, open_plan(bytes[1]));
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
  ASSERT_OK_AND_ASSIGN(const PlanParts parts, open_plan(bytes));
  EXPECT_LE(parts.items.size(), 12u * 1000);
  EXPECT_LE(parts.entries.size(), 16u * 1000);
}

TEST(PlanWireTest, AnyFlippedBitIsCorruption) {
  const std::vector<std::byte> bytes = encode(sample());
  for (size_t at = 0; at < 8 * bytes.size(); ++at) {
    std::vector<std::byte> damaged = bytes;
    damaged[at / 8] ^= std::byte{1} << at % 8;
    ASSERT_CODE(decode(damaged), StatusCode::kCorruption) << "bit " << at;
  }
}

TEST(PlanWireTest, AnyOtherLengthIsCorruptionEvenWithATrueChecksum) {
  std::vector<std::byte> bytes = encode(sample());
  for (size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
    ASSERT_CODE(decode(Bytes(bytes).first(nbytes)), StatusCode::kCorruption) << nbytes;
    std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(nbytes));
    reseal(&cut);
    ASSERT_CODE(decode(cut), StatusCode::kCorruption) << nbytes;
  }
  bytes.insert(bytes.end() - sizeof(uint64_t), std::byte{0});
  reseal(&bytes);
  EXPECT_CODE(decode(bytes), StatusCode::kCorruption);
}

TEST(PlanWireTest, ANewerVersionIsUnsupported) {
  std::vector<std::byte> bytes = encode(sample());
  bytes[4] = std::byte{2};
  reseal(&bytes);
  EXPECT_CODE(decode(bytes), StatusCode::kUnsupported);
}

// With true checksums, whatever stands behind them: an error, or a table that is sound.
TEST(PlanWireTest, NoSealedNonsenseIsBelieved) {
  const std::vector<std::byte> bytes = encode(sample());
  int64_t refused = 0;
  for (uint32_t seed = 0; seed < 30000; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::byte> odd = bytes;
    for (int64_t change = 1 + below(random, 3); change > 0; --change) {
      odd[static_cast<size_t>(8 + below(random, std::ssize(odd) - 16))] =
          static_cast<std::byte>(below(random, 256));
    }
    reseal(&odd);
    const Result<ItemTable> table = decode(odd);
    if (!table.ok()) {
      ++refused;
      ASSERT_CODE(table, StatusCode::kCorruption) << "seed " << seed;
      continue;
    }
    // Adding checks everything, so a table that can be built again is sound.
    ASSERT_EQ(items_of(table_of(items_of(*table))), items_of(*table)) << "seed " << seed;
  }
  EXPECT_GT(refused, 10000);
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
}  // namespace torch_ckpt
