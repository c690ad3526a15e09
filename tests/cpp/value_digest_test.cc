#include "engine/value_digest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/xxh3.h"
#include "support/tensor_digests.h"
#include "support/test_tensor.h"

namespace torch_ckpt::value_digest_test {
namespace {

uint64_t digest_of(const TestTensor& tensor, bool full, int threads = 1) {
  const TensorView view = view_of(tensor);
  const TensorView* const views[] = {&view};
  return value_digests(views, full, threads).front();
}

// The same elements in row-major order, without gaps.
TestTensor contiguous_copy(const TestTensor& tensor) {
  TestTensor out = TestTensor::random("copy", tensor.live.dtype, tensor.live.sizes);
  const std::string packed = tensor.packed();
  std::ranges::copy(as_bytes(packed), out.memory->data());
  return out;
}

// The sampled bytes of the elements in row-major order, one element after the other.
std::string sampled(const TestTensor& tensor) {
  const std::string packed = tensor.packed();
  const int64_t size = itemsize(tensor.live.dtype);
  const Sample sample = sample_of(std::ssize(packed) / size, size);
  std::string out;
  for (const int64_t first : sample.firsts) {
    out +=
        packed.substr(static_cast<size_t>(first * size), static_cast<size_t>(sample.count * size));
  }
  return out;
}

TEST(ValueDigestTest, ASampleHasTheFirstAndTheLastElement) {
  for (const int64_t itemsize : {1, 2, 4, 8, 16}) {
    for (const int64_t numel : {0, 1, 511, 512, 8191, 8192, 8193, 100'003, 123'456'789}) {
      const Sample sample = sample_of(numel, itemsize);
      const bool is_whole = numel * itemsize <= kSampleBlocks * kSampleBlockNbytes;
      ASSERT_EQ(std::ssize(sample.firsts), is_whole ? 1 : kSampleBlocks);
      ASSERT_EQ(sample.firsts.front(), 0);
      ASSERT_EQ(sample.firsts.back() + sample.count, numel);
      ASSERT_LE(sample.count * itemsize, kSampleBlocks * kSampleBlockNbytes);
      for (size_t i = 1; i < sample.firsts.size(); ++i) {
        ASSERT_GE(sample.firsts[i], sample.firsts[i - 1] + sample.count);
      }
    }
  }
}

TEST(ValueDigestTest, RandomViewsHaveTheDigestOfTheirElements) {
  std::mt19937 random(7);
  const DType dtypes[] = {DType::kUInt8, DType::kBFloat16, DType::kFloat32, DType::kComplex128};
  for (int round = 0; round < 300; ++round) {
    const DType dtype = dtypes[pick(random, 4)];
    Dims sizes(static_cast<size_t>(1 + pick(random, 4)));
    for (int64_t& size : sizes) size = pick(random, sizes.size() > 2 ? 24 : 300);
    TestTensor tensor = TestTensor::random("t", dtype, sizes, static_cast<uint32_t>(round));
    if (sizes.size() > 1 && pick(random, 3) > 0) tensor = tensor.transposed(0, sizes.size() - 1);
    if (pick(random, 4) == 0) tensor = tensor.expanded(1 + pick(random, 3));
    const std::string bytes = sampled(tensor);
    const uint64_t expected = xxh3(as_bytes(bytes));
    SCOPED_TRACE(round);
    ASSERT_EQ(digest_of(tensor, false), expected);
    ASSERT_EQ(digest_of(contiguous_copy(tensor), false), expected);
    ASSERT_EQ(digest_of(tensor, true), digest_of(contiguous_copy(tensor), true));
  }
}

// A full digest finds any byte, a sample those of its blocks; however many threads compute it.
TEST(ValueDigestTest, AFullDigestDependsOnEveryByte) {
  const int64_t nbytes = (int64_t{17} << 20) + 3;
  TestTensor tensor = TestTensor::random("t", DType::kUInt8, {nbytes});
  const uint64_t full = digest_of(tensor, true);
  const uint64_t sample = digest_of(tensor, false);
  EXPECT_EQ(digest_of(tensor, true, 4), full);
  const Sample positions = sample_of(nbytes, 1);
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    const int64_t at = round == 0 ? 0 : round == 1 ? nbytes - 1 : pick(random, nbytes);
    std::byte& changed = (*tensor.memory)[static_cast<size_t>(at)];
    changed ^= std::byte{1};
    bool is_sampled = false;
    for (const int64_t first : positions.firsts) {
      is_sampled = is_sampled || (first <= at && at < first + positions.count);
    }
    EXPECT_NE(digest_of(tensor, true), full) << at;
    EXPECT_EQ(digest_of(tensor, false) != sample, is_sampled) << at;
    changed ^= std::byte{1};
  }
}

// The XXH3-128 of those of the pieces, whatever the length of the chunks.
TEST(ValueDigestTest, AStreamOfAnyChunksHasTheDigestOfThePieces) {
  std::mt19937 random(5);
  DigestStream stream;
  for (const int64_t nbytes :
       {int64_t{0}, int64_t{1}, kDigestPieceNbytes - 1, kDigestPieceNbytes, kDigestPieceNbytes + 1,
        2 * kDigestPieceNbytes, 2 * kDigestPieceNbytes + 12345}) {
    const TestTensor tensor = TestTensor::random("t", DType::kUInt8, {nbytes});
    const Bytes bytes = *tensor.memory;
    std::vector<Digest128> pieces;
    for (int64_t begin = 0; begin < nbytes; begin += kDigestPieceNbytes) {
      const int64_t count = std::min(kDigestPieceNbytes, nbytes - begin);
      pieces.push_back(xxh3_128(slice(bytes, begin, count)));
    }
    const Digest128 expected = xxh3_128(std::as_bytes(std::span(pieces)));
    for (const int64_t most : {int64_t{5} << 20, kDigestPieceNbytes + 77, 3 * kDigestPieceNbytes}) {
      for (int64_t at = 0; at < nbytes;) {
        const int64_t count = std::min(pick(random, most), nbytes - at);
        stream.update(slice(bytes, at, count));
        at += count;
      }
      ASSERT_EQ(stream.finish(), expected) << nbytes << " in chunks of up to " << most;
    }
    for (const int threads : {1, 4}) {
      ASSERT_EQ(full_digest_of(tensor, threads), expected) << nbytes << " by " << threads;
    }
  }
}

// Pieces of strided tensors end within a row.
TEST(ValueDigestTest, LongStridedTensorsHaveTheDigestOfTheirElements) {
  for (const int64_t columns : {1023, 1024, 1025, 2049}) {
    const TestTensor tensor =
        TestTensor::random("t", DType::kComplex128, {columns, 512}).transposed(0, 1);
    const std::string packed = tensor.packed();
    DigestStream stream;
    stream.update(as_bytes(packed));
    const Digest128 expected = stream.finish();
    for (const int threads : {1, 4}) ASSERT_EQ(full_digest_of(tensor, threads), expected);
    const TestTensor part = tensor.narrowed({0, 1}, {512, columns - 1});
    ASSERT_EQ(full_digest_of(part), full_digest_of(contiguous_copy(part), 4));
  }
}

TEST(ValueDigestTest, TensorsOfABatchAreTheirOwn) {
  std::vector<TestTensor> tensors;
  for (int64_t i = 0; i < 500; ++i) {
    tensors.push_back(TestTensor::random("t", DType::kInt16, {i, 33}, static_cast<uint32_t>(i)));
  }
  std::vector<TensorView> views;
  std::vector<const TensorView*> batch;
  for (const TestTensor& tensor : tensors) views.push_back(view_of(tensor));
  for (const TensorView& view : views) batch.push_back(&view);
  for (const bool full : {false, true}) {
    const std::vector<uint64_t> digests = value_digests(batch, full, 4);
    for (size_t i = 0; i < tensors.size(); ++i) {
      ASSERT_EQ(digests[i], digest_of(tensors[i], full));
      ASSERT_NE(digests[i], kUnknownDigest);
    }
    EXPECT_EQ(std::set<uint64_t>(digests.begin(), digests.end()).size(), digests.size());
  }
}

}  // namespace
}  // namespace torch_ckpt::value_digest_test
