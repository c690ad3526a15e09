#include "engine/value_digest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/xxh3.h"
#include "support/test_tensor.h"

namespace torch_ckpt {
namespace {

TensorView view_of(const TestTensor& tensor) {
  TensorView view;
  view.dtype = tensor.live.dtype;
  view.sizes = tensor.live.sizes;
  view.strides = tensor.live.strides;
  view.data = tensor.live.data;
  return view;
}

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
}  // namespace torch_ckpt
