#include "base/xxh3.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/xxh3_variant.h"
#include "support/test_tensor.h"

namespace torch_ckpt::xxh3_test {
namespace {

// From the reference implementation's own test vectors.
TEST(Xxh3Test, HasTheValuesOfTheReference) {
  EXPECT_EQ(xxh3({}), 0x2D06800538D394C2u);
  EXPECT_EQ(xxh3(as_bytes("a")), 0xE6C632B61E964E1Fu);
}

// Machines differ in what they choose; files must not.
TEST(Xxh3Test, EveryInstructionSetGivesTheSameSum) {
  for (const int64_t nbytes : {0, 1, 16, 17, 128, 129, 240, 241, 1024, 65536, 100003}) {
    const std::vector<std::byte> bytes = random_bytes(nbytes, 7);
    EXPECT_EQ(xxh3(bytes), kXxh3OfThisFile.hash(bytes.data(), bytes.size())) << nbytes;
  }
}

TEST(Xxh3Test, PartsSumToTheWhole) {
  std::mt19937 random(1);
  Xxh3Stream stream;
  for (int round = 0; round < 50; ++round) {
    const std::vector<std::byte> bytes = random_bytes(pick(random, 5000), 3);
    for (int64_t begin = 0; begin < ssize(bytes);) {
      const int64_t part = std::min(1 + pick(random, 700), ssize(bytes) - begin);
      stream.update(slice(Bytes(bytes), begin, part));
      begin += part;
    }
    EXPECT_EQ(stream.finish(), xxh3(bytes));
  }
}

}  // namespace
}  // namespace torch_ckpt::xxh3_test
