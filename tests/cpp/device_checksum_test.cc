// The lanes of the checksum kernel against the checksums of the CPU.

#include "device/checksum.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "base/block_sums.h"
#include "base/xxh3.h"
#include "support/test_tensor.h"

namespace torch_ckpt {
namespace {

TEST(DeviceChecksumTest, AWarpMakesTheSumThatTheIndexKeeps) {
  std::vector<int64_t> lengths = {kSumBlockNbytes, 3 * kSumBlockNbytes + 17};
  // Around the ends of stripes, of rounds, and of rounds that are in flight together.
  for (const int64_t around : {256, 320, 1024, 1088, 2048, 4096, 5120, 8192, 65536}) {
    for (const int64_t more : {-1, 0, 1, 63, 65}) lengths.push_back(around + more);
  }
  std::mt19937 random(11);
  for (int i = 0; i < 200; ++i) lengths.push_back(kLeastSumNbytes + pick(random, 20000));
  lengths.push_back(kLeastSumNbytes);
  for (const int64_t nbytes : lengths) {
    const std::vector<std::byte> bytes = random_bytes(nbytes, static_cast<uint32_t>(nbytes));
    ASSERT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % kSumAlignment, 0u);
    ASSERT_EQ(sum_block_on_cpu({bytes.data(), nbytes}), xxh3(bytes)) << nbytes;
  }
}

}  // namespace
}  // namespace torch_ckpt
