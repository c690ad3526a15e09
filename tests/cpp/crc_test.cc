// CRC-32 as zip defines it, against an implementation that follows the definition bit by bit.

#include "base/crc.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "support/test_tensor.h"

namespace torch_ckpt::crc_test {
namespace {

constexpr uint32_t kSeed = 20240515;

uint32_t bitwise_crc32(uint32_t crc, Bytes bytes) {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

// The check value that the CRC catalogues give.
TEST(CrcTest, MatchesThePublishedCheckValue) {
  EXPECT_EQ(crc32(0, as_bytes("123456789")), 0xCBF43926u);
  EXPECT_EQ(crc32(0, {}), 0u);
}

// Every short length at every start within a vector register: where unrolled code goes wrong.
TEST(CrcTest, MatchesTheBitwiseReferenceAtEveryLengthAndStart) {
  const std::vector<std::byte> bytes = random_bytes(400, kSeed);
  for (int64_t begin = 0; begin < 64; begin += 7) {
    for (int64_t nbytes = 0; nbytes <= 300; ++nbytes) {
      const Bytes part = slice(Bytes(bytes), begin, nbytes);
      ASSERT_EQ(crc32(0, part), bitwise_crc32(0, part)) << begin << ", " << nbytes;
    }
  }
}

TEST(CrcTest, GoesOnFromAnEarlierSum) {
  const std::vector<std::byte> bytes = random_bytes(5000, kSeed);
  const uint32_t whole = crc32(0, bytes);
  for (int64_t cut = 0; cut <= 5000; cut += 499) {
    const uint32_t first = crc32(0, slice(Bytes(bytes), 0, cut));
    EXPECT_EQ(crc32(first, slice(Bytes(bytes), cut, 5000 - cut)), whole) << cut;
  }
}

TEST(CrcTest, CombineEqualsTheSumOfTheConcatenation) {
  std::mt19937 random(kSeed);
  for (int round = 0; round < 300; ++round) {
    const int64_t na = static_cast<int64_t>(random() % 3000);
    const int64_t nb = static_cast<int64_t>(random() % 3000) * (round % 3);  // Empty ones, too.
    const std::vector<std::byte> bytes =
        random_bytes(na + nb, kSeed + static_cast<uint32_t>(round));
    const uint32_t a = crc32(0, slice(Bytes(bytes), 0, na));
    const uint32_t b = crc32(0, slice(Bytes(bytes), na, nb));
    ASSERT_EQ(crc32_combine(a, b, nb), crc32(0, bytes)) << na << " + " << nb;
  }
}

// Lengths that nobody could sum in a test, by a property: three parts combine alike from the left
// and from the right.
TEST(CrcTest, CombineIsAssociativeAtHugeLengths) {
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 1000; ++round) {
    const auto a = static_cast<uint32_t>(random());
    const auto b = static_cast<uint32_t>(random());
    const auto c = static_cast<uint32_t>(random());
    const auto nb = static_cast<int64_t>(random() >> 3);
    const auto nc = static_cast<int64_t>(random() >> 3);
    ASSERT_EQ(crc32_combine(crc32_combine(a, b, nb), c, nc),
              crc32_combine(a, crc32_combine(b, c, nc), nb + nc));
  }
}

}  // namespace
}  // namespace torch_ckpt::crc_test
