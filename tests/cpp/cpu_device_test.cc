// The CPU device against an oracle that copies element by element.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/crc.h"
#include "device/device.h"
#include "support/strided_oracle.h"
#include "support/test_tensor.h"

namespace torch_ckpt::cpu_device_test {
namespace {

// Runs a copy into memory with bytes of its own around every element, which must stay.
void expect_same_as_oracle(const StridedCopy& copy) {
  int64_t src_nbytes = 0;
  int64_t dst_nbytes = 16;
  const ElementPairs pairs = element_pairs(copy);
  for (const auto& [from, to] : pairs) {
    src_nbytes = std::max(src_nbytes, from + copy.itemsize);
    dst_nbytes = std::max(dst_nbytes, to + copy.itemsize + 16);
  }
  const std::vector<std::byte> src = random_bytes(src_nbytes, 7);
  std::vector<std::byte> expected = random_bytes(dst_nbytes, 8);
  std::vector<std::byte> actual = expected;
  for (const auto& [from, to] : pairs) {
    std::memcpy(expected.data() + to, src.data() + from, static_cast<size_t>(copy.itemsize));
  }
  copy_on_cpu(copy, src.data(), actual.data());
  ASSERT_TRUE(actual == expected) << "itemsize " << copy.itemsize << ", sizes "
                                  << to_string(copy.sizes) << ", source "
                                  << to_string(copy.src_strides) << ", destination "
                                  << to_string(copy.dst_strides);
}

TEST(CpuDeviceTest, RandomCopiesMatchTheOracleForEveryItemsize) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const int64_t itemsizes[] = {1, 2, 3, 4, 8, 12, 16};
    ASSERT_NO_FATAL_FAILURE(
        expect_same_as_oracle(random_copy(random, itemsizes[random() % std::size(itemsizes)])));
  }
}

// Returns the strides of a dense tensor whose dimensions lie in `order`, outermost first.
Dims strides_in_order(const Dims& sizes, const std::vector<size_t>& order, int64_t stride) {
  Dims strides(sizes.size());
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= sizes[order[i]];
  }
  return strides;
}

// Sizes around the edges of registers, thin copies, tiles (64 bytes) and strips (1024 columns),
// with a dimension outside of the transposed two.
TEST(CpuDeviceTest, TransposesMatchTheOracleAroundTileEdges) {
  for (const int64_t itemsize : {1, 2, 3, 4, 8, 16}) {
    for (const int64_t rows : {2, 7, 8, 17, 64, 65}) {
      for (const int64_t columns : {2, 9, 31, 64, 1030}) {
        const Dims src = {rows * columns * itemsize + 5, itemsize, rows * itemsize};
        const Dims dst = {rows * columns * itemsize, columns * itemsize, itemsize};
        ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle({.itemsize = itemsize,
                                                       .sizes = {2, rows, columns},
                                                       .src_strides = src,
                                                       .dst_strides = dst}));
        ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle({.itemsize = itemsize,
                                                       .sizes = {2, rows, columns},
                                                       .src_strides = dst,
                                                       .dst_strides = src}));
      }
    }
  }
}

// All orders of four dimensions, such as NCHW and NHWC, also with gaps between elements.
TEST(CpuDeviceTest, PermutedDimensionsMatchTheOracle) {
  const Dims sizes = {9, 17, 8, 33};
  for (const int64_t itemsize : {1, 2, 4, 8, 16}) {
    for (const int64_t gap : {1, 2}) {
      std::vector<size_t> order = {0, 1, 2, 3};
      do {
        SCOPED_TRACE("gap " + std::to_string(gap));
        ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(
            {.itemsize = itemsize,
             .sizes = sizes,
             .src_strides = strides_in_order(sizes, order, gap * itemsize),
             .dst_strides = strides_in_order(sizes, {0, 1, 2, 3}, itemsize)}));
      } while (std::next_permutation(order.begin(), order.end()));
    }
  }
}

// A repeated dimension has stride 0, which is no step to a neighbor.
TEST(CpuDeviceTest, TransposesOfRepeatedElementsMatchTheOracle) {
  for (const int64_t itemsize : {1, 4, 16}) {
    const Dims sizes = {20, 17, 12};
    const Dims dst = strides_in_order(sizes, {0, 1, 2}, itemsize);
    for (const Dims& src : {Dims{itemsize, 0, 20 * itemsize},
                            {0, itemsize, 17 * itemsize},
                            {itemsize, 20 * itemsize, 0},
                            {0, itemsize, 0},
                            {0, 0, 0}}) {
      ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(
          {.itemsize = itemsize, .sizes = sizes, .src_strides = src, .dst_strides = dst}));
    }
  }
}

TEST(CpuDeviceTest, ACopyWithoutDimensionsMovesOneElement) {
  expect_same_as_oracle({.itemsize = 8,
                         .sizes = {},
                         .src_offset = 24,
                         .src_strides = {},
                         .dst_offset = 3,
                         .dst_strides = {}});
}

TEST(CpuDeviceTest, ACopyWithoutElementsTouchesNothing) {
  copy_on_cpu({.itemsize = 4, .sizes = {2, 0}, .src_strides = {4, 4}, .dst_strides = {4, 4}},
              nullptr, nullptr);
}

TEST(CpuDeviceTest, CopyAndChecksumCopiesAndContinuesTheCrc) {
  for (const int64_t nbytes : {0, 1, 63, 131072, 131073, 400000}) {
    const std::vector<std::byte> src = random_bytes(nbytes, 9);
    std::vector<std::byte> dst(src.size());
    EXPECT_EQ(copy_and_checksum(src, dst, 0), crc32(0, src));
    EXPECT_EQ(dst, src);
    const uint32_t before = crc32(0, as_bytes("before"));
    EXPECT_EQ(copy_and_checksum(src, dst, before), crc32(before, src));
  }
}

}  // namespace
}  // namespace torch_ckpt::cpu_device_test
