#include "base/strided.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <utility>

#include "support/strided_oracle.h"

namespace torch_ckpt::strided_test {
namespace {

constexpr int64_t kHuge = int64_t{1} << 40;

TEST(StridedTest, DimsPrintLikePythonLists) {
  EXPECT_EQ(to_string(Dims{}), "[]");
  EXPECT_EQ(to_string(Dims{2, -3}), "[2, -3]");
}

TEST(StridedTest, NumelIsTheProductOfTheSizesWhereThatIsANumber) {
  const std::pair<Dims, std::optional<int64_t>> cases[] = {
      {{}, 1},
      {{2, 3, 4}, 24},
      {{INT64_MAX}, INT64_MAX},
      {{kHuge, kHuge, 0}, 0},
      {{0, kHuge, kHuge}, 0},
      {{kHuge, kHuge}, std::nullopt},
      {{INT64_MAX, 2}, std::nullopt},
      {{-1}, std::nullopt},
      {{0, -1}, std::nullopt},
      {{-2, -3}, std::nullopt},
  };
  for (const auto& [sizes, numel] : cases) EXPECT_EQ(checked_numel(sizes), numel);
}

TEST(StridedTest, ContiguousStridesCountElementsInRowMajorOrder) {
  EXPECT_EQ(contiguous_strides({}), Dims{});
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Dims{12, 4, 1}));
  EXPECT_EQ(contiguous_strides({2, 0, 3}), (Dims{3, 3, 1}));  // As PyTorch has them.
  const Dims sizes = {2, 1, 3, 4};
  int64_t next = 0;
  for_each_index(
      sizes, [&](const Dims& index) { EXPECT_EQ(dot(index, contiguous_strides(sizes)), next++); });
}

TEST(StridedTest, AContiguousCopySimplifiesToOneDimension) {
  const Dims strides = times(contiguous_strides({2, 3, 4}), 8);
  const StridedCopy simple = simplified(
      {.itemsize = 8, .sizes = {2, 3, 4}, .src_strides = strides, .dst_strides = strides});
  EXPECT_EQ(simple.sizes, Dims{24});
  EXPECT_EQ(simple.src_strides, Dims{8});
  EXPECT_EQ(simple.dst_strides, Dims{8});
}

TEST(StridedTest, DimensionsOfSizeOneVanishWhateverTheirStride) {
  const StridedCopy simple = simplified(
      {.itemsize = 4, .sizes = {1, 5, 1}, .src_strides = {12345, 4, 7}, .dst_strides = {0, 4, 99}});
  EXPECT_EQ(simple.sizes, Dims{5});
  EXPECT_EQ(simplified({.sizes = {1, 1}, .src_strides = {3, 4}, .dst_strides = {5, 6}}).sizes,
            Dims{});
}

TEST(StridedTest, DimensionsContiguousOnOneSideOnlyStayApart) {
  const StridedCopy copy = {
      .itemsize = 4, .sizes = {3, 5}, .src_strides = {20, 4}, .dst_strides = {24, 4}};
  EXPECT_EQ(simplified(copy), copy);
}

TEST(StridedTest, SimplifiedCopiesTheSameElementsInTheSameOrder) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const StridedCopy copy = random_copy(random, int64_t{1} << pick(random, 5));
    const StridedCopy simple = simplified(copy);
    ASSERT_EQ(simple.itemsize, copy.itemsize);
    ASSERT_LE(simple.sizes.size(), copy.sizes.size());
    ASSERT_EQ(element_pairs(simple), element_pairs(copy));
    ASSERT_EQ(simplified(simple), simple);
  }
}

}  // namespace
}  // namespace torch_ckpt::strided_test
