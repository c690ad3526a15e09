#include "geometry/box.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

namespace torch_ckpt::box_test {
namespace {

TEST(BoxTest, PrintsHalfOpenRanges) {
  EXPECT_EQ(to_string(Box{{2, 0}, {2, 8}}), "[2:4, 0:8]");
  EXPECT_EQ(to_string(Box{}), "[]");
}

TEST(BoxTest, ABoxLiesWithinTheTensorThatHasAllOfIt) {
  const std::pair<Box, Dims> within[] = {
      {{}, {}},                    // Of no dimensions.
      {{{0, 0}, {3, 4}}, {3, 4}},  // All of it.
      {{{2, 1}, {1, 3}}, {3, 4}},  // Its end.
      {{{3, 0}, {0, 4}}, {3, 4}},  // Empty, at the end.
      {{{0}, {0}}, {0}},           // Likewise.
      {{{INT64_MAX}, {0}}, {INT64_MAX}},
  };
  for (const auto& [box, sizes] : within) EXPECT_TRUE(lies_within(box, sizes)) << to_string(box);
  const std::pair<Box, Dims> outside[] = {
      {{{4, 0}, {0, 4}}, {3, 4}},
      {{{0, 0}, {4, 4}}, {3, 4}},  // By one element of one dimension.
      {{{0, 1}, {3, 4}}, {3, 4}},
      {{{-1}, {2}}, {3}},
      {{{2}, {-1}}, {3}},
      {{{0}, {1}}, {-1}},
      {{{0}, {1}}, {1, 1}},  // Of another number of dimensions.
      {{{0, 0}, {1, 1}}, {1}},
      {{{0}, {1, 1}}, {1}},
      {{{0}, {1, 1}}, {1, 1}},
      {{{0}, {1}}, {}},
      {{{INT64_MAX}, {INT64_MAX}}, {INT64_MAX}},  // Numbers that overflow together.
      {{{1}, {INT64_MAX}}, {INT64_MAX}},
      {{{INT64_MIN}, {INT64_MIN}}, {5}},
  };
  for (const auto& [box, sizes] : outside) EXPECT_FALSE(lies_within(box, sizes)) << to_string(box);
}

}  // namespace
}  // namespace torch_ckpt::box_test
