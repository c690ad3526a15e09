#include "plan/coalesce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace torch_ckpt::coalesce_test {
namespace {

const ByteRange& wanted_at(const std::vector<ByteRange>& wanted, const Reads& reads, int64_t i) {
  return wanted[static_cast<size_t>(reads.order[static_cast<size_t>(i)])];
}

// What the header promises, checked range by range.
void expect_sound(const std::vector<ByteRange>& wanted, const Reads& reads, int64_t max_nbytes,
                  int64_t max_gap) {
  std::vector<int64_t> order = reads.order;
  std::sort(order.begin(), order.end());
  std::vector<int64_t> all(wanted.size());
  std::iota(all.begin(), all.end(), int64_t{0});
  ASSERT_EQ(order, all);

  int64_t next = 0;
  for (const Read& read : reads.reads) {
    ASSERT_EQ(read.first, next);
    ASSERT_GT(read.last, read.first);
    next = read.last;
    ASSERT_EQ(read.range.begin, wanted_at(wanted, reads, read.first).begin);
    int64_t covered = read.range.begin;
    for (int64_t i = read.first; i < read.last; ++i) {
      const ByteRange& range = wanted_at(wanted, reads, i);
      ASSERT_GE(range.begin, read.range.begin);
      ASSERT_LE(range.end, read.range.end);
      ASSERT_LE(range.begin - covered, max_gap);
      covered = std::max(covered, range.end);
    }
    ASSERT_EQ(read.range.end, covered);
    const bool shared = read.last - read.first > 1;
    ASSERT_TRUE(!shared || read.range.nbytes() <= max_nbytes);
  }
  ASSERT_EQ(next, static_cast<int64_t>(wanted.size()));
  ASSERT_TRUE(
      std::is_sorted(reads.reads.begin(), reads.reads.end(),
                     [](const Read& a, const Read& b) { return a.range.begin < b.range.begin; }));
}

TEST(CoalesceTest, RandomRangesAreEachServedByOneReadWithinTheLimits) {
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<ByteRange> wanted(random() % 30);
    for (ByteRange& range : wanted) {
      range.begin = static_cast<int64_t>(random() % 1000);
      range.end = range.begin + static_cast<int64_t>(random() % 120);
    }
    const int64_t max_nbytes = 1 + static_cast<int64_t>(random() % 400);
    const auto max_gap = static_cast<int64_t>(random() % 50);
    ASSERT_NO_FATAL_FAILURE(
        expect_sound(wanted, coalesce(wanted, max_nbytes, max_gap), max_nbytes, max_gap));
  }
}

TEST(CoalesceTest, NeighboursShareAReadUpToTheGapAndTheLimit) {
  const struct {
    std::vector<ByteRange> wanted;
    int64_t max_nbytes;
    int64_t max_gap;
    std::vector<ByteRange> read;
  } cases[] = {
      {{{0, 10}, {15, 20}}, 20, 5, {{0, 20}}},
      {{{0, 10}, {15, 20}}, 20, 4, {{0, 10}, {15, 20}}},
      {{{0, 10}, {15, 20}}, 19, 5, {{0, 10}, {15, 20}}},
      {{{0, 1000}, {1000, 1001}}, 100, 10, {{0, 1000}, {1000, 1001}}},
      {{{5, 9}, {5, 9}, {6, 7}}, 100, 0, {{5, 9}}},
      {{{200, 300}, {0, 100}, {100, 200}}, 1000, 0, {{0, 300}}},
  };
  for (const auto& [wanted, max_nbytes, max_gap, expected] : cases) {
    const Reads reads = coalesce(wanted, max_nbytes, max_gap);
    ASSERT_NO_FATAL_FAILURE(expect_sound(wanted, reads, max_nbytes, max_gap));
    std::vector<ByteRange> found;
    for (const Read& read : reads.reads) found.push_back(read.range);
    EXPECT_EQ(found, expected);
  }
}

}  // namespace
}  // namespace torch_ckpt::coalesce_test
