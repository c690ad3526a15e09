#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/xxh3.h"
#include "codec/block.h"
#include "codec/compare_variant.h"
#include "codec/encoded_block.h"
#include "codec/raw_block.h"
#include "codec/xor.h"
#include "codec/zstd.h"
#include "support/status_matchers.h"

namespace torch_ckpt::codec_test {
namespace {

using ByteVector = std::vector<std::byte>;
using Random = std::mt19937_64;

ByteVector random_bytes(int64_t nbytes, Random& random) {
  ByteVector bytes(static_cast<size_t>(nbytes));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A way to change units: how many of a million change, and of how many of these all bytes may
// change.
struct Change {
  std::string name;
  int64_t of_a_million = 0;
  int64_t wide_of_a_million = 0;
};

const Change kChanges[] = {
    {"unchanged", 0},
    {"rare", 300},
    {"a learning rate", 80'000},
    {"nearly half", 480'000},
    {"about half", 500'000},
    {"most", 700'000},
    {"all", 1'000'000, 1'000'000},
    {"few high bytes", 80'000, 10'000},
    {"about a third of high bytes", 400'000, 334'000},
    {"all high bytes", 200'000, 1'000'000},
};

void change(ByteVector& bytes, int64_t unit, const Change& how, Random& random) {
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(unit)) {
    if (static_cast<int64_t>(random() % 1'000'000) >= how.of_a_million) continue;
    bytes[at] ^= static_cast<std::byte>(1 + random() % 3);
    const bool is_wide = static_cast<int64_t>(random() % 1'000'000) < how.wide_of_a_million;
    for (size_t i = 1; is_wide && i < static_cast<size_t>(unit); ++i) {
      bytes[at + i] ^= static_cast<std::byte>(random());
    }
  }
}

// Calls `test` with two versions of a block, in all units, changes, and lengths around those of
// vectors and steps.
void for_each_block(const std::function<void(const ByteVector& base, const ByteVector& result,
                                             int64_t unit)>& test) {
  Random random(7);
  for (const int64_t unit : {1, 2, 4, 8}) {
    for (const int64_t nbytes : {int64_t{8}, int64_t{56}, int64_t{256}, int64_t{264},
                                 int64_t{4096} + 24, kBlockNbytes - 8, kBlockNbytes}) {
      for (const Change& how : kChanges) {
        SCOPED_TRACE(how.name + ", units of " + std::to_string(unit) + ", of " +
                     std::to_string(nbytes));
        const ByteVector base = random_bytes(nbytes, random);
        ByteVector result = base;
        change(result, unit, how, random);
        test(base, result, unit);
      }
    }
  }
}

ByteVector xor_of(ByteVector a, const ByteVector& b) {
  xor_bytes(b.data(), a.data(), std::ssize(a));
  return a;
}

ByteVector encode(const ByteVector& base, const ByteVector& result, int64_t unit) {
  ByteVector snapshot = base;
  BlockComparison comparison;
  const RawBlock raw = comparison.take(snapshot, result, unit);
  EXPECT_EQ(snapshot, result);
  EXPECT_EQ(raw.digest, base == result ? 0 : xxh3(result));
  ByteVector encoded;
  EXPECT_OK(encode_block(raw, comparison.streams(), encoded));
  return encoded;
}

TEST(CompareTest, AllInstructionSetsWriteTheSameStreams) {
  struct Taken {
    std::vector<unsigned char> streams;
    std::vector<unsigned char> snapshot;
    size_t changed = 0;
    size_t gaps_nbytes = 0;
    size_t wide = 0;
    bool operator==(const Taken&) const = default;
  };
  const auto take = [](const CompareVariant& variant, const ByteVector& base,
                       const ByteVector& result, int64_t unit) {
    std::vector<unsigned char> streams(kMaxRawNbytes);
    const auto scratch = std::make_unique<CompareScratch>();
    Taken taken;
    taken.snapshot.resize(base.size());
    std::memcpy(taken.snapshot.data(), base.data(), base.size());
    const auto* const source = reinterpret_cast<const unsigned char*>(result.data());
    const auto size = static_cast<size_t>(unit);
    const size_t half = base.size() / 16 * 8;  // In two pieces.
    for (const auto& [begin, end] : {std::pair<size_t, size_t>(0, half), {half, base.size()}}) {
      taken.changed = variant.compare(taken.snapshot.data(), source, begin, end, size,
                                      scratch.get(), taken.changed);
    }
    const WrittenStreams written =
        variant.write_streams(scratch.get(), taken.changed, base.size(), size, streams.data());
    const RawBlock raw = {.unit = static_cast<int32_t>(unit),
                          .count = static_cast<int32_t>(written.count),
                          .gaps_nbytes = static_cast<int32_t>(written.gaps_nbytes),
                          .wide = static_cast<int32_t>(written.wide)};
    streams.resize(static_cast<size_t>(raw.nbytes()));
    taken.streams = streams;
    taken.gaps_nbytes = written.gaps_nbytes;
    taken.wide = written.wide;
    return taken;
  };
  for_each_block([&](const ByteVector& base, const ByteVector& result, int64_t unit) {
    const Taken expected = take(kCompareOfThisFile, base, result, unit);
    for (const CompareVariant* variant : {compare_avx2(), compare_avx512()}) {
      if (variant == nullptr) continue;
      EXPECT_EQ(take(*variant, base, result, unit), expected);
    }
  });
}

TEST(EncodedBlockTest, IsTheXorOfBothVersions) {
  if (!zstd_available().ok()) GTEST_SKIP() << zstd_available().message();
  for_each_block([](const ByteVector& base, const ByteVector& result, int64_t unit) {
    const ByteVector encoded = encode(base, result, unit);
    EXPECT_EQ(encoded.empty(), base == result);
    if (encoded.empty()) return;
    EXPECT_LE(std::ssize(encoded), std::ssize(base) + std::ssize(base) / 255 + 16 + 3 * unit);
    ByteVector xors(base.size(), std::byte{0x5A});
    ASSERT_OK(decode_block(encoded, unit, xors));
    EXPECT_EQ(xors, xor_of(base, result));
  });
}

TEST(EncodedBlockTest, KeepsThePayloadsOfNansAndTheSignOfZero) {
  if (!zstd_available().ok()) GTEST_SKIP() << zstd_available().message();
  const uint32_t values[] = {0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x00000000, 0x80000000};
  for (const uint32_t from : values) {
    for (const uint32_t to : values) {
      ByteVector base(4), result(4);
      store_le(base.data(), from);
      store_le(result.data(), to);
      const ByteVector encoded = encode(base, result, 4);
      ASSERT_EQ(encoded.empty(), from == to);
      if (from == to) continue;
      ByteVector xors(4);
      ASSERT_OK(decode_block(encoded, 4, xors));
      EXPECT_EQ(xor_of(base, xors), result);
    }
  }
}

TEST(EncodedBlockTest, ATruncatedOrLongerBlockIsAnError) {
  if (!zstd_available().ok()) GTEST_SKIP() << zstd_available().message();
  Random random(3);
  for (const int64_t unit : {1, 2, 4, 8}) {
    for (const Change& how : {kChanges[2], kChanges[5], kChanges[6]}) {
      const ByteVector base = random_bytes(1024, random);
      ByteVector result = base;
      change(result, unit, how, random);
      ByteVector encoded = encode(base, result, unit);
      ByteVector xors(base.size());
      for (size_t length = 0; length < encoded.size(); ++length) {
        // In memory of exactly this length, so that a sanitizer sees a read beyond it.
        const ByteVector part(encoded.begin(), encoded.begin() + static_cast<int64_t>(length));
        EXPECT_CODE(decode_block(part, unit, xors), StatusCode::kCorruption);
      }
      encoded.push_back(std::byte{0});
      EXPECT_CODE(decode_block(encoded, unit, xors), StatusCode::kCorruption);
    }
  }
}

TEST(EncodedBlockTest, DamagedBytesNeverWriteOutOfBounds) {
  if (!zstd_available().ok()) GTEST_SKIP() << zstd_available().message();
  Random random(4);
  for (const int64_t unit : {1, 2, 8}) {
    for (const Change& how : {kChanges[2], kChanges[5]}) {
      const ByteVector base = random_bytes(2048, random);
      ByteVector result = base;
      change(result, unit, how, random);
      const ByteVector encoded = encode(base, result, unit);
      const uint64_t sum = xxh3(encoded);
      for (size_t at = 0; at < encoded.size(); ++at) {
        for (const int bits : {1, 0x80, 0xFF}) {
          ByteVector damaged = encoded;
          damaged[at] ^= static_cast<std::byte>(bits);
          EXPECT_NE(static_cast<uint32_t>(xxh3(damaged)), static_cast<uint32_t>(sum));
          ByteVector xors(base.size());
          const Status status = decode_block(damaged, unit, xors);
          EXPECT_TRUE(status.ok() || status.code() == StatusCode::kCorruption);
        }
      }
    }
  }
}

TEST(EncodedBlockTest, ChangesOfASmallLearningRateAreSmall) {
  if (!zstd_available().ok()) GTEST_SKIP() << zstd_available().message();
  Random random(5);
  std::normal_distribution<float> weight(0, 0.02F);
  std::normal_distribution<float> update(0, 3e-6F);
  ByteVector base(kBlockNbytes), result(kBlockNbytes);
  int64_t changed = 0;
  for (int64_t at = 0; at < kBlockNbytes; at += 2) {
    const float master = weight(random);
    const auto before = static_cast<uint16_t>(std::bit_cast<uint32_t>(master) >> 16);
    const auto after =
        static_cast<uint16_t>(std::bit_cast<uint32_t>(master + update(random)) >> 16);
    store_le(base.data() + at, before);
    store_le(result.data() + at, after);
    if (before != after) ++changed;
  }
  const int64_t index_and_value = 6 * changed;
  ByteVector snapshot = base;
  BlockComparison comparison;
  // Two bytes for each change until it is compressed, though few changes have a high byte.
  EXPECT_LE(comparison.take(snapshot, result, 2).nbytes(), 2 * changed + changed / 20);
  EXPECT_LE(5 * std::ssize(encode(base, result, 2)), index_and_value);
}

}  // namespace
}  // namespace torch_ckpt::codec_test
