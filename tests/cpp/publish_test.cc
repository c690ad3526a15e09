#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/xxh3.h"
#include "codec/block.h"
#include "codec/zstd.h"
#include "engine/publish/difference.h"
#include "engine/publish/merge.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::publish_test {
namespace {

using ByteVector = std::vector<std::byte>;
using ::testing::HasSubstr;

// A snapshot of a box, and the digests of its blocks.
struct Published {
  explicit Published(const TestTensor& live)
      : snapshot(TestTensor::random("snapshot", live.live.dtype, live.live.sizes)),
        digests(static_cast<size_t>(block_count(std::ssize(*snapshot.memory)))) {
    EXPECT_OK(take_snapshot(snapshot.live, live.live, digests, 2));
    EXPECT_EQ(snapshot.packed(), live.packed());
  }

  EncodedDifference publish(const TestTensor& live, int threads = 1) {
    auto difference =
        take_difference(snapshot.live, live.live, 0, std::ssize(digests), digests, threads, memory);
    EXPECT_OK(difference);
    EXPECT_EQ(snapshot.packed(), live.packed());
    auto encoded = difference->encode(threads);
    EXPECT_OK(encoded);
    EXPECT_CODE(difference->encode(threads), StatusCode::kInvalidArgument);
    return std::move(*encoded);
  }

  TestTensor snapshot;
  std::vector<uint64_t> digests;
  std::shared_ptr<DifferenceMemory> memory = std::make_shared<DifferenceMemory>();
};

// Changes a few elements per thousand, and whole rows of blocks only now and then.
void step(const TestTensor& tensor, uint32_t seed) {
  std::mt19937 random(seed);
  const auto size = static_cast<size_t>(itemsize(tensor.live.dtype));
  ByteVector& bytes = *tensor.memory;
  for (size_t at = 0; at < bytes.size(); at += size) {
    if (at / kBlockNbytes % 4 != 1 && random() % 100 < 8) {
      bytes[at] ^= static_cast<std::byte>(1 + random() % 3);
    }
  }
}

StoredBlocks stored(const EncodedDifference& encoded, const Box& box, DType dtype) {
  return {
      .box = box, .itemsize = itemsize(dtype), .table = encoded.table, .payload = encoded.payload};
}

Box whole(const TestTensor& tensor) { return {Dims(tensor.live.sizes.size()), tensor.live.sizes}; }

ByteVector xor_of(const std::string& a, const std::string& b) {
  ByteVector out(a.size());
  for (size_t i = 0; i < a.size(); ++i) out[i] = static_cast<std::byte>(a[i] ^ b[i]);
  return out;
}

class PublishTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!zstd_available().ok()) GTEST_SKIP() << zstd_available().message();
  }
};

TEST_F(PublishTest, EveryDtypeAndStrideIsAppliedBitForBit) {
  for (int code = 0; code < kDTypeCount; ++code) {
    const auto dtype = static_cast<DType>(code);
    for (const bool strided : {false, true}) {
      TestTensor live = TestTensor::random("w", dtype, {301, 217}, 5);
      if (strided) live = live.transposed(0, 1).narrowed({3, 5}, {201, 287});
      Published published(live);
      const std::string before = live.packed();
      step(live, 6);
      const EncodedDifference encoded = published.publish(live, 2);

      const TestTensor target = TestTensor::random("target", dtype, live.live.sizes, 9);
      std::memcpy(target.memory->data(), before.data(), before.size());
      ByteVector mask(before.size());
      ASSERT_OK(
          merge_blocks(mask, &target.live, whole(live), stored(encoded, whole(live), dtype), 2));
      ASSERT_OK(apply_mask(target.live, mask, 2));
      EXPECT_EQ(target.packed(), live.packed()) << dtype_info(dtype).name;
      ASSERT_OK(apply_mask(target.live, mask, 1));
      EXPECT_EQ(target.packed(), before);
    }
  }
}

TEST_F(PublishTest, ChainsOfVersionsAreMergedForAnyBox) {
  const TestTensor live = TestTensor::random("w", DType::kBFloat16, {64, 40, 50});
  Published published(live);
  const std::string first = live.packed();
  std::vector<EncodedDifference> versions;
  for (uint32_t version = 0; version < 3; ++version) {
    step(live, version);
    versions.push_back(published.publish(live));
  }
  const Box boxes[] = {{{0, 0, 0}, {64, 40, 50}},  {{16, 0, 0}, {16, 40, 50}},
                       {{0, 10, 0}, {64, 10, 50}}, {{0, 0, 25}, {64, 40, 25}},
                       {{63, 39, 49}, {1, 1, 1}},  {{3, 0, 0}, {0, 40, 50}}};
  for (const Box& box : boxes) {
    // The values before, in a tensor with the strides of the whole one.
    TestTensor base = TestTensor::random("base", DType::kBFloat16, {64, 40, 50});
    std::memcpy(base.memory->data(), first.data(), first.size());
    base = base.narrowed(box.offsets, box.sizes);
    const std::string expected = live.narrowed(box.offsets, box.sizes).packed();
    for (const int threads : {1, 3}) {
      for (const bool checked : {false, true}) {
        ByteVector mask(expected.size());
        for (const EncodedDifference& version : versions) {
          ASSERT_OK(merge_blocks(mask, checked ? &base.live : nullptr, box,
                                 stored(version, whole(live), DType::kBFloat16), threads));
        }
        EXPECT_EQ(mask, xor_of(base.packed(), expected)) << to_string(box);
      }
    }
  }
}

TEST_F(PublishTest, SomeBlocksAreTakenAndMergedAsAllAre) {
  const TestTensor live = TestTensor::random("w", DType::kFloat32, {100'001});
  Published all(live);
  Published some(live);
  const std::string before = live.packed();
  step(live, 2);
  const EncodedDifference together = all.publish(live);
  ByteVector mask(before.size());
  EncodedDifference joined;
  for (int64_t block = 0; block < std::ssize(some.digests); block += 2) {
    const int64_t end = std::min<int64_t>(block + 2, std::ssize(some.digests));
    auto difference =
        take_difference(some.snapshot.live, live.live, block, end, some.digests, 1, some.memory);
    ASSERT_OK(difference);
    ASSERT_OK_AND_ASSIGN(const EncodedDifference encoded, difference->encode(1));
    StoredBlocks part = stored(encoded, whole(live), DType::kFloat32);
    part.first_block = block;
    ASSERT_OK(merge_blocks(mask, nullptr, whole(live), part, 1));
    joined.payload.insert(joined.payload.end(), encoded.payload.begin(), encoded.payload.end());
    joined.table.insert(joined.table.end(), encoded.table.begin(), encoded.table.end());
  }
  EXPECT_EQ(joined.payload, together.payload);
  EXPECT_EQ(joined.table, together.table);
  EXPECT_EQ(mask, xor_of(before, live.packed()));
}

TEST_F(PublishTest, AnotherBaseIsAMismatchAlsoInUnchangedBlocks) {
  const TestTensor live = TestTensor::random("w", DType::kInt8, {5 * kBlockNbytes});
  Published published(live);
  const TestTensor target = TestTensor::random("target", DType::kInt8, live.live.sizes);
  const EncodedDifference nothing = published.publish(live);
  EXPECT_TRUE(nothing.payload.empty());
  step(live, 3);
  const EncodedDifference changes = published.publish(live);
  for (const int64_t at : {int64_t{0}, kBlockNbytes + 7, 5 * kBlockNbytes - 1}) {
    (*target.memory)[static_cast<size_t>(at)] ^= std::byte{1};
    ByteVector mask(target.memory->size());
    const Status status = merge_blocks(mask, &target.live, whole(live),
                                       stored(changes, whole(live), DType::kInt8), 2);
    EXPECT_CODE(status, StatusCode::kMismatch);
    EXPECT_CODE(
        merge_blocks({}, &target.live, whole(live), stored(changes, whole(live), DType::kInt8), 2),
        StatusCode::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr("block " + std::to_string(at / kBlockNbytes) + " of"));
    (*target.memory)[static_cast<size_t>(at)] ^= std::byte{1};
  }
}

TEST_F(PublishTest, EachDamagedByteOfTableAndPayloadIsRefused) {
  const TestTensor live = TestTensor::random("w", DType::kBFloat16, {700});
  Published published(live);
  const TestTensor target = TestTensor::random("target", DType::kBFloat16, {700});
  step(live, 4);
  EncodedDifference encoded = published.publish(live);
  const auto merge = [&](const EncodedDifference& difference) {
    ByteVector mask(target.memory->size());
    const StoredBlocks blocks = stored(difference, whole(live), DType::kBFloat16);
    Status status = merge_blocks(mask, &target.live, whole(live), blocks, 1);
    // Without a mask, the blocks are checked all the same.
    EXPECT_EQ(merge_blocks({}, &target.live, whole(live), blocks, 1).code(), status.code());
    return status;
  };
  ASSERT_OK(merge(encoded));
  for (ByteVector* bytes : {&encoded.payload, &encoded.table}) {
    for (size_t at = 0; at < bytes->size(); ++at) {
      for (const int bits : {1, 0x80, 0xFF}) {
        (*bytes)[at] ^= static_cast<std::byte>(bits);
        EXPECT_FALSE(merge(encoded).ok()) << at;
        (*bytes)[at] ^= static_cast<std::byte>(bits);
      }
    }
  }
  for (ByteVector* bytes : {&encoded.payload, &encoded.table}) {
    const ByteVector sound = *bytes;
    while (!bytes->empty()) {
      bytes->pop_back();
      EXPECT_CODE(merge(encoded), StatusCode::kCorruption);
    }
    *bytes = sound;
  }
}

TEST_F(PublishTest, TheLastBlockOfTheLongestBoxHasANumber) {
  constexpr int64_t kLongest = std::numeric_limits<int64_t>::max();
  ByteVector mask(1);
  const ByteVector table(kBlockRowNbytes);
  StoredBlocks blocks = {.box = {{0}, {kLongest}},
                         .first_block = kLongest / kBlockNbytes,
                         .table = table,
                         .payload = {}};
  EXPECT_OK(merge_blocks(mask, nullptr, {{kLongest - 1}, {1}}, blocks, 1));
  ++blocks.first_block;
  EXPECT_CODE(merge_blocks(mask, nullptr, {{kLongest - 1}, {1}}, blocks, 1),
              StatusCode::kCorruption);
}

TEST_F(PublishTest, ADifferenceIsHardlyLongerThanTheValues) {
  for (const DType dtype : {DType::kUInt8, DType::kBFloat16, DType::kComplex128}) {
    TestTensor live = TestTensor::random("w", dtype, {1 << 18}, 1);
    Published published(live);
    live = TestTensor::random("w", dtype, {1 << 18}, 2);
    const EncodedDifference encoded = published.publish(live);
    const int64_t nbytes = std::ssize(*live.memory);
    EXPECT_LE(std::ssize(encoded.payload) + std::ssize(encoded.table), nbytes + nbytes / 1000);
  }
}

TEST_F(PublishTest, ADifferenceTakesLittleMemoryUntilItIsEncoded) {
  const TestTensor live = TestTensor::random("w", DType::kBFloat16, {1 << 20});
  Published published(live);
  step(live, 1);
  auto difference =
      take_difference(published.snapshot.live, live.live, 0, std::ssize(published.digests),
                      published.digests, 1, published.memory);
  ASSERT_OK(difference);
  const int64_t changed = difference->changed_nbytes();
  EXPECT_GT(changed, 0);
  // A gap and a low byte for each element of two bytes, and a record for each block.
  EXPECT_LE(difference->nbytes(), changed + changed / 50 + std::ssize(published.digests) * 64);
  ASSERT_OK(difference->encode(1));
  EXPECT_EQ(difference->nbytes(), 0);
}

TEST(DifferenceMemoryTest, ChunksAreFilledByOneDifferenceAfterAnotherAndThenReused) {
  constexpr int64_t kMost = DifferenceMemory::kChunkNbytes;
  const auto memory = std::make_shared<DifferenceMemory>();
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<DifferenceChunk> one, memory->acquire(100));
  const std::byte* const place = one->memory.bytes().data();
  one->filled_nbytes = 100;
  memory->hand_on(one);
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<DifferenceChunk> other, memory->acquire(kMost - 100));
  EXPECT_EQ(one, other);
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<DifferenceChunk> another, memory->acquire(100));
  EXPECT_NE(one, another);  // Only one thread fills a chunk.
  memory->hand_on(other);
  one = nullptr;
  ASSERT_OK_AND_ASSIGN(one, memory->acquire(kMost));
  EXPECT_NE(one, other);  // It has too little room.
  other = nullptr;
  ASSERT_OK_AND_ASSIGN(other, memory->acquire(kMost));
  EXPECT_EQ(other->memory.bytes().data(), place);
  EXPECT_EQ(other->filled_nbytes, 0);
}

TEST_F(PublishTest, CallsThatDoNotMatchChangeNothing) {
  const TestTensor live = TestTensor::random("w", DType::kBFloat16, {40, 50});
  Published published(live);
  const std::string before = published.snapshot.packed();
  step(live, 1);
  std::vector<uint64_t>& digests = published.digests;
  const LiveTensor& to = published.snapshot.live;
  const auto refused = [&](const LiveTensor& snapshot, const LiveTensor& source, int64_t first,
                           int64_t end, std::span<uint64_t> sums) {
    EXPECT_CODE(take_difference(snapshot, source, first, end, sums, 1, published.memory),
                StatusCode::kInvalidArgument);
    EXPECT_EQ(published.snapshot.packed(), before);
  };
  refused(to, TestTensor::random("w", DType::kFloat16, {40, 50}).live, 0, 1, digests);
  refused(to, live.transposed(0, 1).live, 0, 1, digests);
  refused(published.snapshot.transposed(0, 1).live, live.transposed(0, 1).live, 0, 1, digests);
  refused(to, live.live, 0, 1, {});
  refused(to, live.live, 0, 2, digests);
  refused(to, live.live, 1, 0, digests);
  refused(to, live.live, -1, 1, digests);

  ByteVector mask(before.size() - 2);
  EXPECT_CODE(apply_mask(live.live, mask, 1), StatusCode::kInvalidArgument);
  const StoredBlocks nothing = {.box = whole(live), .itemsize = 2, .table = {}, .payload = {}};
  EXPECT_CODE(merge_blocks(mask, nullptr, whole(live), nothing, 1), StatusCode::kInvalidArgument);
  mask.resize(before.size());
  EXPECT_CODE(merge_blocks(mask, nullptr, {{0}, {2000}}, nothing, 1), StatusCode::kInvalidArgument);
  EXPECT_OK(merge_blocks(mask, nullptr, whole(live), nothing, 1));
  constexpr int64_t kMost = INT64_MAX;
  for (const Box& box : {Box{{0, 0}, {kMost, 2}}, Box{{kMost, 0}, {40, 50}}, Box{{0}, {40, 50}},
                         Box{{0, -1}, {40, 50}}, Box{{0, 0}, {-1, 50}}}) {
    const StoredBlocks invalid = {.box = box, .itemsize = 2, .table = {}, .payload = {}};
    EXPECT_CODE(merge_blocks(mask, nullptr, whole(live), invalid, 1), StatusCode::kCorruption);
  }
}

}  // namespace
}  // namespace torch_ckpt::publish_test
