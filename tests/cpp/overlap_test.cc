// Cuts of copies against an oracle that follows every element.

#include "geometry/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/strided_oracle.h"

namespace torch_ckpt::overlap_test {
namespace {

std::string describe(const StridedCopy& copy) {
  return "itemsize " + std::to_string(copy.itemsize) + ", sizes " + to_string(copy.sizes) +
         ", source " + std::to_string(copy.src_offset) + " " + to_string(copy.src_strides) +
         ", destination " + std::to_string(copy.dst_offset) + " " + to_string(copy.dst_strides);
}

// The longest run of bytes inside the source range that no element comes from.
int64_t widest_gap(const StridedCopy& copy) {
  ElementPairs pairs = sorted(element_pairs(copy));
  int64_t gap = 0;
  int64_t covered = pairs.front().first;
  for (const auto& [from, to] : pairs) {
    gap = std::max(gap, from - covered);
    covered = std::max(covered, from + copy.itemsize);
  }
  return gap;
}

// What the header promises of any cut.
void expect_sound(const StridedCopy& copy, const std::vector<StridedCopy>& parts,
                  int64_t max_nbytes, int64_t max_gap) {
  ElementPairs together;
  for (const StridedCopy& part : parts) {
    SCOPED_TRACE(describe(part));
    ASSERT_EQ(part.itemsize, copy.itemsize);
    const ElementPairs pairs = element_pairs(part);
    ASSERT_FALSE(pairs.empty());
    together.insert(together.end(), pairs.begin(), pairs.end());
    ASSERT_LE(source_range(part).nbytes(), std::max(max_nbytes, copy.itemsize));
    ASSERT_LE(widest_gap(part), max_gap);
  }
  ASSERT_EQ(sorted(together), sorted(element_pairs(copy)));
}

TEST(OverlapTest, ACopyOfABoxTakesTheElementsOfTheBox) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Dims stored = random_sizes(random, 4, 6);
    const Dims src_strides = random_strides(random, stored, 4, true);
    Box box;
    for (const int64_t size : stored) {
      box.offsets.push_back(pick(random, size + 1));
      box.sizes.push_back(pick(random, size - box.offsets.back() + 1));
    }
    const Dims dst_strides = random_strides(random, box.sizes, 4, false);
    const StridedCopy copy = copy_of_box(box, 4, 1000, src_strides, dst_strides);

    ElementPairs expected;
    for_each_index(box.sizes, [&](Dims index) {
      const int64_t to = dot(index, dst_strides);
      for (size_t d = 0; d < index.size(); ++d) index[d] += box.offsets[d];
      expected.emplace_back(1000 + dot(index, src_strides), to);
    });
    ASSERT_EQ(element_pairs(copy), expected);
  }
}

TEST(OverlapTest, TheSourceRangeIsTheSmallestThatHoldsEveryElement) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const StridedCopy copy = random_copy(random, 4);
    const ElementPairs pairs = sorted(element_pairs(copy));
    if (pairs.empty()) continue;
    ASSERT_EQ(source_range(copy), (ByteRange{pairs.front().first, pairs.back().first + 4}));
  }
}

TEST(OverlapTest, RandomCutsCopyTheSameElementsWithinTheirLimits) {
  for (uint32_t seed = 0; seed < 5000; ++seed) {
    std::mt19937 random(seed);
    const StridedCopy copy = random_copy(random, int64_t{1} << pick(random, 5));
    const int64_t max_nbytes = 1 + pick(random, pick(random, 2) == 0 ? 40 : 2000);
    const int64_t max_gap = pick(random, 2) == 0 ? 0 : pick(random, 200);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", max " + std::to_string(max_nbytes) + ", gap " +
                 std::to_string(max_gap) + ": " + describe(copy));
    ASSERT_NO_FATAL_FAILURE(
        expect_sound(copy, split_by_source(copy, max_nbytes, max_gap), max_nbytes, max_gap));
  }
}

// A part that holds the bytes of its neighbours' elements too would be read twice.
TEST(OverlapTest, PartsOfADenseTensorTileItsBytesInOrder) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    StridedCopy copy;
    copy.itemsize = 4;
    copy.sizes = {1 + pick(random, 5), 1 + pick(random, 5), 1 + pick(random, 5)};
    copy.dst_strides = times(contiguous_strides(copy.sizes), 4);
    copy.src_strides = copy.dst_strides;
    std::vector<size_t> order = {0, 1, 2};  // Row-major, channels-last, transposed...
    std::shuffle(order.begin(), order.end(), random);
    int64_t stride = 4;
    for (const size_t d : order) {
      copy.src_strides[d] = stride;
      stride *= copy.sizes[d];
    }
    int64_t next = 0;
    for (const StridedCopy& part : split_by_source(copy, 4 + pick(random, 100), 0)) {
      ASSERT_EQ(source_range(part).begin, next) << describe(copy);
      next = source_range(part).end;
    }
    ASSERT_EQ(next, stride) << describe(copy);
  }
}

TEST(OverlapTest, ACopyIsCutIntoAsFewPartsAsItsLimitsPermit) {
  const StridedCopy dense = {
      .itemsize = 4, .sizes = {8, 16}, .src_strides = {64, 4}, .dst_strides = {4, 32}};
  const StridedCopy apart = {
      .itemsize = 4, .sizes = {8, 16}, .src_strides = {164, 4}, .dst_strides = {64, 4}};
  const StridedCopy repeated = {
      .itemsize = 4, .sizes = {1000, 16}, .src_strides = {0, 4}, .dst_strides = {64, 4}};
  const StridedCopy transposed = {
      .itemsize = 4, .sizes = {16, 8}, .src_strides = {4, 64}, .dst_strides = {32, 4}};
  const StridedCopy three = {
      .itemsize = 16, .sizes = {3}, .src_strides = {16}, .dst_strides = {16}};
  const StridedCopy one = {.itemsize = 16, .sizes = {}, .src_strides = {}, .dst_strides = {}};
  const StridedCopy none = {
      .itemsize = 4, .sizes = {3, 0}, .src_strides = {4, 4}, .dst_strides = {4, 4}};
  const struct {
    const StridedCopy& copy;
    int64_t max_nbytes;
    int64_t max_gap;
    size_t parts;
  } cases[] = {
      {dense, 512, 0, 1},
      {dense, 511, 0, 2},
      {apart, 1 << 20, 100, 1},
      {apart, 1 << 20, 99, 8},
      {repeated, 64, 0, 1},
      {transposed, 128, 0, 4},  // Along rows of its own: each is as long as it may be.
      {three, 1, 0, 3},
      {one, 1, 0, 1},
      {none, 100, 0, 0},
  };
  for (const auto& [copy, max_nbytes, max_gap, count] : cases) {
    SCOPED_TRACE(describe(copy));
    const std::vector<StridedCopy> parts = split_by_source(copy, max_nbytes, max_gap);
    EXPECT_EQ(parts.size(), count);
    expect_sound(copy, parts, max_nbytes, max_gap);
  }
  EXPECT_EQ(split_by_source(dense, 512, 0), std::vector<StridedCopy>{dense});
}

}  // namespace
}  // namespace torch_ckpt::overlap_test
