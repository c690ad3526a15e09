#include "geometry/box.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace torch_ckpt {
namespace {

TEST(BoxTest, PrintsHalfOpenRanges) {
  EXPECT_EQ(to_string(Box{{2, 0}, {2, 8}}), "[2:4, 0:8]");
  EXPECT_EQ(to_string(Box{}), "[]");
}

TEST(BoxTest, ABoxLiesWithinTheTensorItCovers) {
  EXPECT_TRUE(lies_within({{0, 0}, {3, 4}}, {3, 4}));
  EXPECT_TRUE(lies_within({{2, 1}, {1, 3}}, {3, 4}));
  EXPECT_TRUE(lies_within({}, {}));
}

TEST(BoxTest, AnEmptyBoxLiesWithinUpToTheEnd) {
  EXPECT_TRUE(lies_within({{3, 0}, {0, 4}}, {3, 4}));
  EXPECT_FALSE(lies_within({{4, 0}, {0, 4}}, {3, 4}));
  EXPECT_TRUE(lies_within({{0}, {0}}, {0}));
}

TEST(BoxTest, ABoxReachesOutsideByOneElementOfOneDimension) {
  EXPECT_FALSE(lies_within({{0, 0}, {4, 4}}, {3, 4}));
  EXPECT_FALSE(lies_within({{0, 1}, {3, 4}}, {3, 4}));
}

TEST(BoxTest, NothingNegativeLiesWithin) {
  EXPECT_FALSE(lies_within({{-1}, {2}}, {3}));
  EXPECT_FALSE(lies_within({{2}, {-1}}, {3}));
  EXPECT_FALSE(lies_within({{0}, {1}}, {-1}));
}

TEST(BoxTest, AnotherNumberOfDimensionsIsOutside) {
  EXPECT_FALSE(lies_within({{0}, {1}}, {1, 1}));
  EXPECT_FALSE(lies_within({{0, 0}, {1, 1}}, {1}));
  EXPECT_FALSE(lies_within({{0}, {1, 1}}, {1}));
  EXPECT_FALSE(lies_within({{0}, {1}}, {}));
}

TEST(BoxTest, NumbersThatOverflowTogetherAreOutside) {
  EXPECT_FALSE(lies_within({{INT64_MAX}, {INT64_MAX}}, {INT64_MAX}));
  EXPECT_FALSE(lies_within({{1}, {INT64_MAX}}, {INT64_MAX}));
  EXPECT_FALSE(lies_within({{INT64_MIN}, {INT64_MIN}}, {5}));
  EXPECT_TRUE(lies_within({{INT64_MAX}, {0}}, {INT64_MAX}));
}

}  // namespace
}  // namespace torch_ckpt
