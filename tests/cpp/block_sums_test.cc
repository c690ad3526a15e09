#include "base/block_sums.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "support/test_tensor.h"

namespace torch_ckpt::block_sums_test {
namespace {

constexpr int64_t kBlock = 512;

BlockSums sums_of(Bytes bytes) {
  BlockSummer summer(kBlock);
  summer.append(bytes);
  return summer.finish();
}

TEST(BlockSumsTest, PartsOfAnyLengthGiveTheSumsOfTheWhole) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::vector<std::byte> bytes = random_bytes(pick(random, 5 * kBlock), seed);
    BlockSummer summer(kBlock);
    for (int64_t begin = 0; begin < ssize(bytes);) {
      const int64_t part = std::min(1 + pick(random, 3 * kBlock), ssize(bytes) - begin);
      summer.append(slice(Bytes(bytes), begin, part));
      begin += part;
    }
    const BlockSums sums = summer.finish();
    EXPECT_EQ(sums, sums_of(bytes));
    EXPECT_EQ(sums.file_nbytes, ssize(bytes));
    EXPECT_EQ(static_cast<int64_t>(sums.sums.size()), BlockSums::block_count(ssize(bytes), kBlock));
    EXPECT_EQ(sums.first_mismatch(0, bytes), -1);
  }
}

TEST(BlockSumsTest, AnyChangedByteIsFoundInItsBlock) {
  const std::vector<std::byte> bytes = random_bytes(3 * kBlock + 100, 1);
  const BlockSums sums = sums_of(bytes);
  for (int64_t at = 0; at < ssize(bytes); at += 7) {
    std::vector<std::byte> damaged = bytes;
    damaged[static_cast<size_t>(at)] ^= std::byte{1};
    EXPECT_EQ(sums.first_mismatch(0, damaged), at / kBlock * kBlock);
    // Later blocks alone are sound.
    const int64_t next = (at / kBlock + 1) * kBlock;
    if (next < ssize(bytes)) {
      EXPECT_EQ(sums.first_mismatch(next, Bytes(damaged).subspan(static_cast<size_t>(next))), -1);
    }
  }
}

TEST(BlockSumsTest, BlocksThatHaveChangedPlacesAreFound) {
  std::vector<std::byte> bytes = random_bytes(2 * kBlock, 1);
  const BlockSums sums = sums_of(bytes);
  std::rotate(bytes.begin(), bytes.begin() + kBlock, bytes.end());
  EXPECT_EQ(sums.first_mismatch(0, bytes), 0);
}

TEST(BlockSumsTest, RangesRoundOutToWholeBlocksWithinTheFile) {
  const BlockSums sums = sums_of(random_bytes(3 * kBlock + 100, 1));
  EXPECT_EQ(sums.block_begin(0), 0);
  EXPECT_EQ(sums.block_begin(kBlock - 1), 0);
  EXPECT_EQ(sums.block_begin(kBlock), kBlock);
  EXPECT_EQ(sums.block_end(0), 0);
  EXPECT_EQ(sums.block_end(1), kBlock);
  EXPECT_EQ(sums.block_end(kBlock), kBlock);
  EXPECT_EQ(sums.block_end(3 * kBlock + 1), 3 * kBlock + 100);
}

}  // namespace
}  // namespace torch_ckpt::block_sums_test
