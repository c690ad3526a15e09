// Launch plans, carried out as the kernel would, against the CPU device.

#include "device/pack_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "support/pack_cases.h"
#include "support/pack_on_cpu.h"
#include "support/status_matchers.h"
#include "support/strided_oracle.h"
#include "support/test_tensor.h"

namespace torch_ckpt::pack_plan_test {
namespace {

// Memory at a multiple of kStagingAlignment, as staging buffers are.
class AlignedBytes {
 public:
  explicit AlignedBytes(Bytes bytes) : memory_(bytes.size() + kStagingAlignment) {
    std::copy(bytes.begin(), bytes.end(), data());
  }
  std::byte* data() {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory_.data()));
    return memory_.data() + align_up(address, kStagingAlignment) - address;
  }

 private:
  std::vector<std::byte> memory_;
};

void expect_same_as_cpu_device(const PackCase& given, const PackOptions& options) {
  const auto [tensors, staging] = packed_by_cpu(given);
  AlignedBytes own_tensors(given.tensors);
  AlignedBytes own_staging(given.staging);
  const std::vector<TensorCopy> copies = given.copies_in(own_tensors.data());
  ASSERT_OK_AND_ASSIGN(const PackPlan plan, plan_pack(given.direction, copies, options));
  execute_on_cpu(plan, own_staging.data());
  EXPECT_EQ(std::memcmp(own_tensors.data(), tensors.data(), tensors.size()), 0);
  EXPECT_EQ(std::memcmp(own_staging.data(), staging.data(), staging.size()), 0);
}

TEST(PackPlanTest, RandomTensorsGoWhereTheCpuDevicePutsThem) {
  for (uint32_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const PackDirection direction : {PackDirection::kPack, PackDirection::kUnpack}) {
      const PackCase given = random_pack_case(seed, direction);
      PackOptions options = {.staging_nbytes = ssize(given.staging)};
      if (seed % 3 == 0) options.direct_nbytes = 100;
      if (seed % 4 == 0) options.workers = 7;
      ASSERT_NO_FATAL_FAILURE(expect_same_as_cpu_device(given, options));
    }
  }
}

// As a device does it that holds only a little of the staging buffer. Returns how many windows.
int64_t expect_same_window_by_window(const PackCase& given, int64_t window_nbytes) {
  const auto [tensors, staging] = packed_by_cpu(given);
  AlignedBytes own_tensors(given.tensors);
  AlignedBytes memory(std::vector<std::byte>(static_cast<size_t>(window_nbytes)));
  std::vector<std::byte> own_staging = given.staging;
  const std::vector<TensorCopy> copies = given.copies_in(own_tensors.data());
  const PackOptions options = {.staging_nbytes = ssize(given.staging),
                               .window_nbytes = window_nbytes};
  const Result<PackPlan> plan = plan_pack(given.direction, copies, options);
  EXPECT_OK(plan.status());
  if (!plan.ok()) return 0;
  EXPECT_LE(plan->window_nbytes, window_nbytes);
  for (const PackWindow& window : plan->windows) {
    std::byte* there = own_staging.data() + window.begin;
    std::byte* here = memory.data() + (window.begin - window.base());
    const auto nbytes = static_cast<size_t>(window.end - window.begin);
    // Gaps between copies keep their bytes here, so that all bytes can be compared.
    std::memcpy(here, there, nbytes);
    run_window_on_cpu(*plan, window, memory.data());
    if (given.packs()) std::memcpy(there, here, nbytes);
  }
  EXPECT_EQ(std::memcmp(own_tensors.data(), tensors.data(), tensors.size()), 0);
  EXPECT_EQ(own_staging, staging);
  return static_cast<int64_t>(plan->windows.size());
}

TEST(PackPlanTest, WindowByWindowGivesTheSameBytes) {
  int64_t most_windows = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const PackDirection direction : {PackDirection::kPack, PackDirection::kUnpack}) {
      const PackCase given = random_pack_case(seed, direction);
      most_windows = std::max(most_windows, expect_same_window_by_window(given, 1024));
      ASSERT_FALSE(HasFailure());
    }
  }
  EXPECT_GT(most_windows, 10);
}

// A window that came to a packed image must not touch what copy calls or other windows bring.
TEST(PackPlanTest, WindowsOfAPackedImageMeetNothingElse) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const PackCase given = random_pack_case(seed, PackDirection::kPack);
    std::vector<std::byte> memory = given.tensors;
    const PackOptions options = {
        .staging_nbytes = ssize(given.staging), .window_nbytes = 4096, .direct_nbytes = 300};
    ASSERT_OK_AND_ASSIGN(const PackPlan plan,
                         plan_pack(given.direction, given.copies_in(memory.data()), options));
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (const PackWindow& window : plan.windows) ranges.emplace_back(window.begin, window.end);
    for (const DirectCopy& copy : plan.direct) {
      ranges.emplace_back(copy.staging_offset, copy.staging_offset + copy.nbytes);
    }
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 0; i + 1 < ranges.size(); ++i) {
      ASSERT_LE(ranges[i].second, ranges[i + 1].first) << "seed " << seed;
    }
  }
}

// Bytes that nobody touches: plans for addresses that are only numbers.
std::byte* address(uint64_t number) { return reinterpret_cast<std::byte*>(number); }

StridedCopy contiguous(int64_t numel, int64_t itemsize, int64_t staging_offset) {
  return {.itemsize = itemsize,
          .sizes = {numel},
          .src_strides = {itemsize},
          .dst_offset = staging_offset,
          .dst_strides = {itemsize}};
}

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(PackPlanTest, ThousandsOfSmallTensorsAreOneLaunchWithEvenShares) {
  std::vector<TensorCopy> copies;
  std::mt19937 random(3);
  int64_t staging = 0;
  for (int i = 0; i < 20000; ++i) {
    const int64_t numel = pick(random, 50) == 0 ? 20000 : 1 + pick(random, 1500);
    copies.push_back(
        {address(uint64_t{1} << 40 | uint64_t(staging)), contiguous(numel, 2, staging)});
    staging = align_up(staging + 2 * numel, 64) + 448;  // As the frames of files part them.
  }
  const PackOptions options = {
      .staging_nbytes = staging, .window_nbytes = 128 * kMiB, .workers = 500};
  ASSERT_OK_AND_ASSIGN(const PackPlan plan, plan_pack(PackDirection::kPack, copies, options));
  ASSERT_EQ(plan.windows.size(), 1u);
  EXPECT_TRUE(plan.direct.empty());

  std::vector<int64_t> shares;
  for (int32_t worker = 0; worker < plan.windows[0].worker_end; ++worker) {
    int64_t share = 0;
    for (int32_t c = plan.first_chunk[worker]; c < plan.first_chunk[worker + 1]; ++c) {
      share += plan.chunks[c].count + 64;  // A chunk costs a warp some time by itself.
    }
    shares.push_back(share);
  }
  ASSERT_NEAR(static_cast<double>(shares.size()), 500.0, 25.0);
  const int64_t mean = std::accumulate(shares.begin(), shares.end(), int64_t{0}) / 500;
  shares.pop_back();  // The last one has what is left.
  for (const int64_t share : shares) ASSERT_NEAR(double(share), double(mean), 0.1 * double(mean));
}

TEST(PackPlanTest, WhatIsAlignedMovesSixteenBytesAtATime) {
  // One byte behind a multiple of 16 on both sides: 15 bytes, units of 16, and the rest.
  const TensorCopy copy = {address(0x1001), contiguous(1000, 1, 17)};
  ASSERT_OK_AND_ASSIGN(const PackPlan plan,
                       plan_pack(PackDirection::kPack, {{copy}}, {.staging_nbytes = 2000}));
  ASSERT_EQ(plan.chunks.size(), 3u);
  EXPECT_EQ(plan.chunks[0].count * plan.chunks[0].width, 15u);
  EXPECT_EQ(plan.chunks[1].width, 16u);
  EXPECT_EQ(plan.chunks[1].count, 61u);
  EXPECT_EQ(plan.chunks[2].count * plan.chunks[2].width, 9u);
}

// A shard of columns: rows of 96 bf16 of 1024, to where they lie one behind the other.
TEST(PackPlanTest, RowsMoveInUnitsAsWideAsTheyAllow) {
  for (const auto& [address_and_widths, offset] :
       std::vector<std::pair<std::pair<uint64_t, uint32_t>, int64_t>>{
           {{0x10000, 16}, 0}, {{0x10004, 4}, 64}, {{0x10000, 2}, 2}}) {
    const TensorCopy copy = {address(address_and_widths.first),
                             {.itemsize = 2,
                              .sizes = {50, 96},
                              .src_strides = {2048, 2},
                              .dst_offset = offset,
                              .dst_strides = {192, 2}}};
    ASSERT_OK_AND_ASSIGN(const PackPlan plan,
                         plan_pack(PackDirection::kPack, {{copy}}, {.staging_nbytes = 10000}));
    EXPECT_EQ(plan.chunks.front().width, address_and_widths.second);
    EXPECT_EQ(plan.shapes.size(), 1u);
  }
}

TEST(PackPlanTest, LargeContiguousTensorsAreLeftToCopyCalls) {
  const std::vector<TensorCopy> copies = {{address(0x100000), contiguous(4 * kMiB, 4, 64)},
                                          {address(0x200), contiguous(100, 4, 0x2000000)}};
  ASSERT_OK_AND_ASSIGN(const PackPlan plan,
                       plan_pack(PackDirection::kPack, copies, {.staging_nbytes = 64 * kMiB}));
  EXPECT_EQ(plan.direct, (std::vector<DirectCopy>{{address(0x100000), 64, 16 * kMiB}}));
  ASSERT_EQ(plan.windows.size(), 1u);
  EXPECT_EQ(plan.windows[0].begin, 0x2000000);
  EXPECT_EQ(plan.windows[0].end, 0x2000000 + 400);
}

// Elements that no 32 bits count, and offsets beyond them: every chunk's ends are where the
// element lies that they should move.
TEST(PackPlanTest, OffsetsBeyondTwoToTheThirtyFirstAreExact) {
  const StridedCopy copy = {.itemsize = 4,
                            .sizes = {3, 70000, 50000},
                            .src_strides = {4, 12, int64_t{12} * 70000},
                            .dst_offset = 4096,
                            .dst_strides = {int64_t{4} * 70000 * 50000, 4 * 50000, 4}};
  const uint64_t base = uint64_t{0x7f0000000000};
  const TensorCopy tensor = {address(base), copy};
  const PackOptions options = {.staging_nbytes = int64_t{1} << 40,
                               .window_nbytes = int64_t{1} << 40};
  ASSERT_OK_AND_ASSIGN(const PackPlan plan, plan_pack(PackDirection::kPack, {{tensor}}, options));
  int64_t next = 0;  // The element that the next chunk begins with.
  for (const PackChunk& chunk : plan.chunks) {
    ASSERT_EQ(chunk.width, 4u);
    for (const int64_t at : {int64_t{0}, int64_t{chunk.count} - 1}) {
      const int64_t element = next + at;
      const Dims index = {element / (int64_t{70000} * 50000), element / 50000 % 70000,
                          element % 50000};
      const UnitOffsets offsets =
          unit_offsets(chunk, plan.shapes.data(), static_cast<uint32_t>(chunk.first + at));
      ASSERT_EQ(static_cast<uint64_t>(chunk.src + offsets.src),
                base + static_cast<uint64_t>(dot(index, copy.src_strides)));
      ASSERT_EQ(chunk.dst + offsets.dst, copy.dst_offset + dot(index, copy.dst_strides));
    }
    next += chunk.count;
  }
  EXPECT_EQ(next, int64_t{3} * 70000 * 50000);
}

TEST(PackPlanTest, MoreDimensionsThanAShapeHasAreCutApart) {
  std::mt19937 random(5);
  for (const PackDirection direction : {PackDirection::kPack, PackDirection::kUnpack}) {
    PackCase given;
    given.direction = direction;
    const Dims sizes = {2, 3, 2, 2, 3, 2, 2};
    const Dims dense = times(contiguous_strides(sizes), 4);
    const Dims gaps = {7200, 2000, 900, 400, 120, 50, 20};
    StridedCopy copy = {.itemsize = 4, .sizes = sizes, .src_strides = gaps, .dst_strides = dense};
    if (direction == PackDirection::kUnpack) std::swap(copy.src_strides, copy.dst_strides);
    given.add(random, copy);
    given.fill(1);
    expect_same_as_cpu_device(given, {.staging_nbytes = ssize(given.staging)});
  }
}

// Two tensors that take columns of the same stored rows by turns.
TEST(PackPlanTest, CopiesOutOfTheStagingBufferMayInterleave) {
  for (const int64_t window_nbytes : {256, 512, 100000}) {
    PackCase given;
    given.direction = PackDirection::kUnpack;
    given.tensors.resize(8000);
    given.staging.resize(8000);
    for (const int64_t column : {0, 8}) {
      given.copies.push_back({nullptr,
                              {.itemsize = 4,
                               .sizes = {100, 8},
                               .src_offset = column * 4,
                               .src_strides = {64, 4},
                               .dst_strides = {32, 4}}});
      given.places.push_back(column == 0 ? 0 : 4000);
    }
    given.fill(2);
    expect_same_window_by_window(given, window_nbytes);
  }
}

TEST(PackPlanTest, PlacesThatAreNoneAreRefused) {
  const auto status = [](const StridedCopy& copy) {
    const std::vector<TensorCopy> copies = {{address(4096), copy}};
    return plan_pack(PackDirection::kPack, copies, {.staging_nbytes = 1000}).status();
  };
  EXPECT_OK(status(contiguous(250, 4, 0)));
  const int64_t most = std::numeric_limits<int64_t>::max();
  StridedCopy repeats = contiguous(10, 4, 0);
  repeats.dst_strides = {0};
  StridedCopy too_far = contiguous(10, 4, 0);
  too_far.dst_strides = {most / 2};
  StridedCopy no_strides = contiguous(10, 4, 0);
  no_strides.dst_strides = {};
  for (const StridedCopy& copy :
       {contiguous(251, 4, 0), contiguous(1, 4, -4), contiguous(1, 4, most), contiguous(-1, 4, 0),
        contiguous(most, 4, 0), repeats, too_far, no_strides}) {
    EXPECT_EQ(status(copy).code(), StatusCode::kInvalidArgument);
  }
}

TEST(PackPlanTest, TwoCopiesToOnePlaceAreRefused) {
  const std::vector<TensorCopy> copies = {{address(4096), contiguous(100, 4, 0)},
                                          {address(8192), contiguous(100, 4, 396)}};
  const auto plan = plan_pack(PackDirection::kPack, copies, {.staging_nbytes = 1000});
  EXPECT_EQ(plan.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(plan.status().message(), "two copies overlap at 396 of the staging buffer");
}

// Against the processor's own division, at both ends of every power and at random.
TEST(PackPlanTest, DivisionByAMultiplicationIsExact) {
  std::mt19937 random(4);
  std::vector<int64_t> sizes = {1, 2, 3, 5, 6, 7, 641, 1000003, (int64_t{1} << 29) + 1};
  for (int i = 0; i < 300; ++i) sizes.push_back(2 + pick(random, int64_t{1} << pick(random, 30)));
  for (const int64_t size : sizes) {
    // A region whose inner dimension has this size.
    const StridedCopy copy = {
        .itemsize = 1, .sizes = {2, size}, .src_strides = {1, 2}, .dst_strides = {size, 1}};
    const std::vector<TensorCopy> copies = {{address(4097), copy}};
    ASSERT_OK_AND_ASSIGN(const PackPlan plan, plan_pack(PackDirection::kPack, copies,
                                                        {.staging_nbytes = int64_t{1} << 32,
                                                         .window_nbytes = int64_t{1} << 32}));
    if (plan.shapes.empty()) continue;
    const Divisor& by = plan.shapes[0].dims[0].size;
    if (by.value != size) continue;
    for (int i = 0; i < 200; ++i) {
      const int64_t multiple = pick(random, (int64_t{1} << 31) / size) * size;
      for (const int64_t n : {multiple - 1, multiple, multiple + 1, (int64_t{1} << 31) - 1}) {
        if (n < 0) continue;
        ASSERT_EQ(quotient(static_cast<uint32_t>(n), by), n / size) << n << " by " << size;
      }
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::pack_plan_test
