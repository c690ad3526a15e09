#include "plan/item_extents.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plan/wire.h"
#include "support/damaged_frame.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt::item_extents_test {
namespace {

using Extents = std::vector<ItemExtent>;

constexpr int64_t kEndOfAll = int64_t{1} << 61;

Extents sample() {
  return {{0, 0, 700, true}, {1, 4096, 300, true}, {5, 704, 1, false}, {300, 1 << 20, 0, true}};
}

// A frame of these numbers, the first of them the count.
std::vector<std::byte> finished(const std::vector<int64_t>& numbers) {
  WireWriter out;
  for (const int64_t number : numbers) out.varint(number);
  return out.finish("TCEX", 1);
}

// As often small as large.
int64_t random_below(std::mt19937& random, int64_t limit) {
  const auto bits = static_cast<int64_t>((uint64_t{random()} << 32 | random()) >> 1);
  return (bits >> pick(random, 63)) % limit;
}

TEST(ItemExtentsTest, RandomExtentsComeBackAscending) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    Extents extents;
    int64_t item = 0;
    for (int64_t i = pick(random, 60); i > 0; --i) {
      item += pick(random, 3) == 0 ? random_below(random, kEndOfAll / 64) : 0;
      const int64_t offset = random_below(random, kEndOfAll);
      const int64_t nbytes = random_below(random, kEndOfAll - offset);
      extents.push_back({item++, offset, nbytes, pick(random, 2) == 0});
    }
    Extents shuffled = extents;
    for (size_t i = shuffled.size(); i > 1; --i) {
      std::swap(shuffled[i - 1], shuffled[static_cast<size_t>(pick(random, std::ssize(extents)))]);
    }
    ASSERT_OK_AND_ASSIGN(const Extents read, decode_extents(encode(shuffled)));
    ASSERT_EQ(read, extents);
  }
}

TEST(ItemExtentsTest, TheLargestNumbersComeBack) {
  const Extents extents = {{0, kEndOfAll - 1, 0, true},
                           {1, 0, kEndOfAll - 1, false},
                           {2, kEndOfAll - 2, 1, true},
                           {kEndOfAll - 1, 0, 0, false}};
  ASSERT_OK_AND_ASSIGN(const Extents read, decode_extents(encode(extents)));
  EXPECT_EQ(read, extents);
}

TEST(ItemExtentsTest, AnExtentTakesAtMostSevenBytes) {
  Extents extents;
  int64_t end = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    const int64_t offset = (end + 4095) / 4096 * 4096;
    extents.push_back({i, offset, 30'000'000 + 977 * i, true});
    end = offset + extents.back().nbytes;
  }
  EXPECT_LE(encode(extents).size(), 7u * 1000 + 20);
  EXPECT_EQ(encode(Extents{}).size(), 17u);
}

TEST(ItemExtentsTest, AnyDamageIsRefused) {
  expect_damage_is_refused(encode(sample()), decode_extents);
}

TEST(ItemExtentsTest, NoSealedNonsenseIsBelieved) {
  expect_nonsense_is_refused(encode(sample()), decode_extents,
                             [](const Extents& extents, const std::vector<std::byte>& bytes) {
                               ASSERT_LE(3 * std::ssize(extents), std::ssize(bytes));
                               int64_t next = 0;
                               for (const ItemExtent& extent : extents) {
                                 ASSERT_GE(extent.item, next);
                                 ASSERT_LT(extent.item, kEndOfAll);
                                 ASSERT_TRUE(range_within(extent.offset, extent.nbytes, kEndOfAll));
                                 next = extent.item + 1;
                               }
                               ASSERT_OK_AND_ASSIGN(const Extents read,
                                                    decode_extents(encode(extents)));
                               ASSERT_EQ(read, extents);
                             });
}

TEST(ItemExtentsTest, NumbersThatNoFileHasAreCorruption) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  ASSERT_OK(decode_extents(finished({1, kEndOfAll - 1, 0, 0})));
  ASSERT_OK(decode_extents(finished({1, 0, 2 * (kEndOfAll - 2), 2})));
  ASSERT_OK(decode_extents(finished({2, 0, 0, 2, 0, 1, 0})));
  const std::vector<int64_t> cases[] = {
      {1, kEndOfAll, 0, 0},                     // An item,
      {1, kMost, 0, 0},                         //
      {2, kEndOfAll - 1, 0, 0, 0, 0, 0},        // and the one behind it.
      {2, 7, 0, 0, kMost, 0, 0},                //
      {1, 0, 2 * kEndOfAll, 0},                 // An offset,
      {1, 0, kMost, 0},                         //
      {1, 0, kMost - 1, 0},                     //
      {1, 0, 1, 0},                             // or one before the file,
      {2, 0, 0, 2, 0, 3, 0},                    // also behind another extent.
      {1, 0, 0, 2 * kEndOfAll},                 // A length,
      {1, 0, 0, kMost},                         //
      {1, 0, 2 * (kEndOfAll - 1), 2},           // with the offset.
      {2, 0, 0, 2 * (kEndOfAll - 1), 0, 0, 2},  //
  };
  for (const auto& numbers : cases) {
    EXPECT_CODE(decode_extents(finished(numbers)), StatusCode::kCorruption)
        << ::testing::PrintToString(numbers);
  }
}

TEST(ItemExtentsTest, FewBytesCannotAskForManyExtents) {
  for (const int64_t count : {int64_t{2}, int64_t{1} << 30, std::numeric_limits<int64_t>::max()}) {
    EXPECT_CODE(decode_extents(finished({count, 0, 0, 0})), StatusCode::kCorruption) << count;
  }
}

}  // namespace
}  // namespace torch_ckpt::item_extents_test
