// Flat ranges against an oracle that walks every element.

#include "geometry/flat_range.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/strided_oracle.h"

namespace torch_ckpt::flat_range_test {
namespace {

// The flat positions of the elements of the boxes, one box after another.
std::vector<int64_t> flat_positions(const Dims& sizes, const std::vector<Box>& boxes) {
  std::vector<int64_t> positions;
  const Dims strides = contiguous_strides(sizes);
  for (const Box& box : boxes) {
    EXPECT_TRUE(lies_within(box, sizes)) << to_string(box);
    for_each_index(box.sizes, [&](const Dims& index) {
      positions.push_back(dot(box.offsets, strides) + dot(index, strides));
    });
  }
  return positions;
}

void expect_exact(const Dims& sizes, int64_t begin, int64_t end) {
  SCOPED_TRACE("[" + std::to_string(begin) + ", " + std::to_string(end) + ") of " +
               to_string(sizes));
  const std::vector<Box> boxes = flat_range_to_boxes(sizes, begin, end);
  std::vector<int64_t> expected(static_cast<size_t>(end - begin));
  std::iota(expected.begin(), expected.end(), begin);
  ASSERT_EQ(flat_positions(sizes, boxes), expected);
  const auto dims = static_cast<int64_t>(sizes.size());
  ASSERT_LE(static_cast<int64_t>(boxes.size()), std::max<int64_t>(2 * dims - 1, 1));
  for (const Box& box : boxes) ASSERT_GT(*checked_numel(box.sizes), 0);
}

TEST(FlatRangeTest, EveryRunOfSmallTensorsIsExact) {
  const std::vector<Dims> shapes = {{},        {3, 0},       {1},          {5},       {3, 4},
                                    {4, 1, 3}, {1, 3, 1, 2}, {2, 3, 2, 2}, {1, 1, 1}, {2, 1, 1, 5}};
  for (const Dims& sizes : shapes) {
    const int64_t numel = *checked_numel(sizes);
    for (int64_t begin = 0; begin <= numel; ++begin) {
      for (int64_t end = begin; end <= numel; ++end) expect_exact(sizes, begin, end);
    }
  }
}

TEST(FlatRangeTest, RandomRunsOfRandomTensorsAreExact) {
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Dims sizes = random_sizes(random, 5, 7);
    const int64_t numel = *checked_numel(sizes);
    const int64_t begin = pick(random, numel + 1);
    expect_exact(sizes, begin, begin + pick(random, numel - begin + 1));
  }
}

TEST(FlatRangeTest, TheWholeTensorIsOneBox) {
  const std::vector<Box> boxes = flat_range_to_boxes({3, 4, 5}, 0, 60);
  EXPECT_EQ(boxes, (std::vector<Box>{{{0, 0, 0}, {3, 4, 5}}}));
}

// A run that starts and ends in the middle of everything needs every box it is allowed.
TEST(FlatRangeTest, TheBoundOnTheNumberOfBoxesIsReached) {
  EXPECT_EQ(flat_range_to_boxes({4, 4, 4}, 5 * 1, 4 * 14 + 1).size(), 5u);
}

TEST(FlatRangeTest, TensorsTooLargeToWalkAreCutByArithmetic) {
  const int64_t rows = int64_t{1} << 40;
  const std::vector<Box> boxes = flat_range_to_boxes({rows, 1024}, 1000, rows * 1024 - 1);
  EXPECT_EQ(boxes,
            (std::vector<Box>{
                {{0, 1000}, {1, 24}}, {{1, 0}, {rows - 2, 1024}}, {{rows - 1, 0}, {1, 1023}}}));
}

}  // namespace
}  // namespace torch_ckpt::flat_range_test
