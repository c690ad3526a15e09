#include "plan/layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace torch_ckpt::layout_test {
namespace {

TEST(LayoutTest, RandomSlicesAscendAlignedWithoutOverlap) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<SliceNbytes> items(random() % 20);
    for (SliceNbytes& item : items) {
      const bool large = random() % 3 == 0;
      item = {.head = static_cast<int64_t>(random() % 20) * kSmallAlignment,
              .payload = static_cast<int64_t>(random() % 100000) + (large ? kLargePayload : 0),
              .tail = static_cast<int64_t>(random() % 500)};
    }
    const Layout layout = lay_out(items);
    ASSERT_EQ(layout.slices.size(), items.size());
    int64_t end = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const Slice& slice = layout.slices[i];
      ASSERT_EQ(slice.nbytes.head, items[i].head);
      ASSERT_EQ(slice.nbytes.payload, items[i].payload);
      ASSERT_EQ(slice.nbytes.tail, items[i].tail);
      ASSERT_GE(slice.offset, end);
      ASSERT_LT(slice.offset - end, kLargeAlignment);
      ASSERT_EQ(slice.offset % kSmallAlignment, 0);
      ASSERT_EQ(slice.payload_offset() % kSmallAlignment, 0);
      if (items[i].payload >= kLargePayload) {
        ASSERT_EQ(slice.payload_offset() % kLargeAlignment, 0);
      } else {
        ASSERT_LT(slice.offset - end, kSmallAlignment);
      }
      end = slice.end();
    }
    ASSERT_EQ(layout.nbytes, end);
  }
}

TEST(LayoutTest, PayloadsAreLargeFromOneMebibyteOn) {
  const SliceNbytes small = {.head = 192, .payload = kLargePayload - 1, .tail = 10};
  const SliceNbytes large = {.head = 192, .payload = kLargePayload, .tail = 10};
  EXPECT_EQ(next_slice_offset(100, small), 128);
  EXPECT_EQ(next_slice_offset(100, large), 4096 - 192);
  EXPECT_EQ(next_slice_offset(4096 - 192, large), 4096 - 192);
  EXPECT_EQ(next_slice_offset(4096 - 191, large), 2 * 4096 - 192);
}

TEST(LayoutTest, TheFirstSliceOfAFileStartsAtItsBeginningOrInAGap) {
  EXPECT_EQ(next_slice_offset(0, {.head = 64, .payload = 1, .tail = 1}), 0);
  EXPECT_EQ(next_slice_offset(0, {.head = 64, .payload = kLargePayload, .tail = 1}), 4032);
  EXPECT_EQ(next_slice_offset(0, {.head = 0, .payload = kLargePayload, .tail = 0}), 0);
}

TEST(LayoutTest, ASliceKnowsItsParts) {
  const Slice slice = {1000, {.head = 64, .payload = 30, .tail = 5}};
  EXPECT_EQ(slice.payload_offset(), 1064);
  EXPECT_EQ(slice.tail_offset(), 1094);
  EXPECT_EQ(slice.end(), 1099);
  EXPECT_EQ(slice.total_nbytes(), 99);
}

}  // namespace
}  // namespace torch_ckpt::layout_test
