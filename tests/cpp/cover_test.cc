// Sets of boxes against an oracle that counts the boxes of each element.

#include "geometry/cover.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/status_matchers.h"
#include "support/strided_oracle.h"

namespace torch_ckpt::cover_test {
namespace {

bool lies_in(const Dims& at, const Box& box) {
  for (size_t d = 0; d < at.size(); ++d) {
    if (at[d] < box.offsets[d] || at[d] >= box.offsets[d] + box.sizes[d]) return false;
  }
  return true;
}

Dims moved(Dims at, const Dims& offsets) {
  for (size_t d = 0; d < at.size(); ++d) at[d] += offsets[d];
  return at;
}

int64_t count(const Dims& at, const std::vector<Box>& boxes) {
  int64_t out = 0;
  for (const Box& box : boxes) out += lies_in(at, box) ? 1 : 0;
  return out;
}

Box random_box(std::mt19937& random, const Dims& within) {
  Box box{Dims(within.size()), within};
  for (size_t d = 0; d < within.size(); ++d) {
    if (pick(random, 3) == 0) continue;
    box.offsets[d] = pick(random, within[d] + 1);
    box.sizes[d] = pick(random, within[d] - box.offsets[d] + 1);
  }
  return box;
}

// Cuts a box in two, and those again, anywhere.
void tile(std::mt19937& random, const Box& box, std::vector<Box>* out) {
  const auto ndim = std::ssize(box.sizes);
  const auto d = static_cast<size_t>(ndim == 0 ? 0 : pick(random, ndim));
  if (ndim == 0 || box.sizes[d] < 2 || pick(random, 6) == 0) return out->push_back(box);
  const int64_t at = 1 + pick(random, box.sizes[d] - 1);
  Box lower = box;
  Box upper = box;
  lower.sizes[d] = at;
  upper.sizes[d] -= at;
  upper.offsets[d] += at;
  tile(random, lower, out);
  tile(random, upper, out);
}

TEST(CoverTest, AFaultIsFoundWhereAnElementIsNotInExactlyOneBox) {
  int64_t exact = 0;
  int64_t missing = 0;
  int64_t shared = 0;
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Dims sizes = random_sizes(random, 4, 7);
    std::vector<Box> boxes;
    tile(random, {Dims(sizes.size()), sizes}, &boxes);
    if (pick(random, 3) == 0) boxes.erase(boxes.begin() + pick(random, std::ssize(boxes)));
    for (int64_t more = pick(random, 3); more > 0; --more) {
      boxes.push_back(random_box(random, sizes));
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    const Box wanted = random_box(random, sizes);
    bool is_exact = true;
    for_each_index(wanted.sizes, [&](const Dims& at) {
      is_exact = is_exact && count(moved(at, wanted.offsets), boxes) == 1;
    });
    const auto fault = cover_fault(wanted, boxes);
    ASSERT_EQ(fault.has_value(), !is_exact);
    if (!fault) {
      ++exact;
      continue;
    }
    (fault->is_missing ? missing : shared) += 1;
    ASSERT_GT(*checked_numel(fault->at.sizes), 0);
    for_each_index(fault->at.sizes, [&](const Dims& at) {
      const Dims element = moved(at, fault->at.offsets);
      ASSERT_TRUE(lies_in(element, wanted));
      const int64_t found = count(element, boxes);
      ASSERT_TRUE(fault->is_missing ? found == 0 : found > 1) << found;
    });
  }
  EXPECT_GT(exact, 1000);
  EXPECT_GT(missing, 1000);
  EXPECT_GT(shared, 1000);
}

TEST(CoverTest, ManyBoxesAreCheckedInLittleTime) {
  // A grid in 16 dimensions, and one in 3, of which the last box is missing.
  for (const auto& [ndim, count] : {std::pair(16, 2), std::pair(3, 40)}) {
    Box wanted{Dims(static_cast<size_t>(ndim)), Dims(static_cast<size_t>(ndim), count)};
    std::vector<Box> boxes;
    for_each_index(wanted.sizes, [&](const Dims& at) {
      boxes.push_back({at, Dims(static_cast<size_t>(ndim), 1)});
    });
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(cover_fault(wanted, boxes).has_value());
    boxes.pop_back();
    const auto fault = cover_fault(wanted, boxes);
    ASSERT_TRUE(fault.has_value());
    EXPECT_TRUE(fault->is_missing);
    EXPECT_EQ(fault->at.offsets, Dims(static_cast<size_t>(ndim), count - 1));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }
}

TEST(CoverTest, TheErrorNamesTheTensorAndThePart) {
  const Box wanted{{0, 2}, {4, 2}};
  const auto hole = check_cover("w", wanted, {{{0, 0}, {3, 4}}});
  EXPECT_CODE(hole, StatusCode::kMismatch);
  EXPECT_EQ(hole.message(), "cannot load [0:4, 2:4] of 'w': no stored box contains [3:4, 2:4]");
  const auto overlap = check_cover("w", wanted, {{{0, 0}, {4, 4}}, {{3, 1}, {1, 2}}});
  EXPECT_CODE(overlap, StatusCode::kCorruption);
  EXPECT_EQ(overlap.message(),
            "cannot load [0:4, 2:4] of 'w': different stored boxes contain [3:4, 2:3]");
}

}  // namespace
}  // namespace torch_ckpt::cover_test
