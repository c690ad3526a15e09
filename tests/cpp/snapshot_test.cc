#include "engine/save/snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/huge_page_budget.h"
#include "support/later_device.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::snapshot_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMib = int64_t{1} << 20;

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

PackedCopy copy_of(Bytes source, int64_t offset) {
  return {{.name = "bytes",
           .sizes = {ssize(source)},
           .strides = {1},
           .data = const_cast<std::byte*>(source.data())},
          offset};
}

std::unique_ptr<Snapshot> make_snapshot(int64_t nbytes = kMib, int threads = 1) {
  HeapMemorySource heap;
  auto snapshot = Snapshot::make(heap, nbytes, threads);
  EXPECT_OK(snapshot);
  return std::move(*snapshot);
}

TEST(SnapshotTest, EveryCopyIsAtItsPlaceWhoeverMadeIt) {
  for (const int threads : {1, 3}) {
    const auto snapshot = make_snapshot(21 * kMib, threads);
    const std::vector<std::byte> large = random_bytes(17 * kMib + 5, 1);
    const std::vector<std::byte> small = random_bytes(77, 2);
    const TestTensor strided =
        TestTensor::random("strided", DType::kInt16, {700, 300}).transposed(0, 1);
    const std::vector<PackedCopy> copies = {copy_of(large, 4096),
                                            copy_of({}, 21 * kMib),
                                            copy_of(small, 19 * kMib + 1),
                                            {strided.live, 20 * kMib}};
    ASSERT_OK(snapshot->copy(copies, threads));
    EXPECT_TRUE(as_text(slice(snapshot->bytes(), 4096, ssize(large))) == as_text(large));
    EXPECT_TRUE(as_text(slice(snapshot->bytes(), 19 * kMib + 1, 77)) == as_text(small));
    EXPECT_TRUE(as_text(slice(snapshot->bytes(), 20 * kMib, 420000)) == strided.packed());
    EXPECT_EQ(snapshot->bytes()[0], std::byte{0});
  }
}

TEST(SnapshotTest, CopiesOfAnyLengthAndPlaceTouchNothingElse) {
  const auto snapshot = make_snapshot();
  const std::vector<std::byte> source = random_bytes(400, 3);
  for (const int64_t nbytes : {0, 1, 15, 16, 17, 63, 64, 65, 79, 128, 200}) {
    for (int64_t from = 0; from < 17; ++from) {
      const int64_t to = 4096 + (from * 5) % 19;
      const MutableBytes around = slice(snapshot->bytes(), to - 64, nbytes + 128);
      std::ranges::fill(around, std::byte{0});
      ASSERT_OK(snapshot->copy(std::vector{copy_of(slice(Bytes(source), from, nbytes), to)}, 1));
      std::vector<std::byte> expected(around.size());
      std::ranges::copy(slice(source, from, nbytes), expected.begin() + 64);
      EXPECT_TRUE(as_text(around) == as_text(expected)) << nbytes << " bytes from " << from;
    }
  }
}

// Tensors of a device and of the host by turns, of all lengths, so that a device that writes
// between its own would be seen; some are strided.
TEST(SnapshotTest, TensorsOfADeviceAndOfTheHostAreSideBySide) {
  LaterDevice device;
  const auto snapshot = make_snapshot(4 * kMib, 2);
  std::vector<TestTensor> tensors;
  std::vector<PackedCopy> copies;
  std::vector<std::string> expected;
  int64_t offset = 0;
  for (int64_t i = 0; i < 300; ++i) {
    TestTensor& tensor = tensors.emplace_back(TestTensor::random(
        str_cat("t", i), i % 3 == 0 ? DType::kFloat32 : DType::kInt8, {i % 37, 1 + i % 91}));
    if (i % 5 == 0) tensor = tensor.transposed(0, 1);
    expected.push_back(tensor.packed());
    copies.push_back({i % 2 == 0 ? device.holding(tensor.live) : tensor.live, offset});
    offset += static_cast<int64_t>(expected.back().size()) + i % 4;
  }
  for (int round = 0; round < 2; ++round) {
    std::ranges::fill(snapshot->bytes(), std::byte{7});
    ASSERT_OK(snapshot->copy(copies, 2));
    for (size_t i = 0; i < copies.size(); ++i) {
      const MutableBytes found =
          slice(snapshot->bytes(), copies[i].offset, static_cast<int64_t>(expected[i].size()));
      ASSERT_EQ(as_text(found), expected[i]) << i;
    }
  }
  EXPECT_EQ(device.begun(), 2);
  EXPECT_EQ(device.pinned(), 1);
}

TEST(SnapshotTest, TensorsOfTwoDevicesAreSideBySide) {
  LaterDevice devices[2];
  const auto snapshot = make_snapshot();
  const TestTensor tensor = TestTensor::random("t", DType::kInt8, {100});
  std::vector<PackedCopy> copies;
  for (int64_t i = 0; i < 8; ++i) copies.push_back({devices[i % 2].holding(tensor.live), 100 * i});
  ASSERT_OK(snapshot->copy(copies, 1));
  for (int64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(as_text(slice(snapshot->bytes(), 100 * i, 100)), tensor.packed()) << i;
  }
  EXPECT_EQ(devices[0].pinned() + devices[1].pinned(), 1);
}

TEST(SnapshotTest, MemoryThatCannotBePinnedIsFilledAsWell) {
  LaterDevice device;
  device.fail_to_pin(unsupported("not here"));
  const auto snapshot = make_snapshot();
  const TestTensor tensor = TestTensor::random("t", DType::kInt8, {100});
  ASSERT_OK(snapshot->copy(std::vector<PackedCopy>{{device.holding(tensor.live), 64}}, 1));
  EXPECT_EQ(as_text(slice(snapshot->bytes(), 64, 100)), tensor.packed());
}

TEST(SnapshotTest, MemoryIsPinnedNoLongerThanItIsThere) {
  LaterDevice device;
  auto snapshot = make_snapshot();
  snapshot->pin_for(cpu_device());
  EXPECT_EQ(device.pinned(), 0);
  snapshot->pin_for(device);
  snapshot->pin_for(device);
  EXPECT_EQ(device.pinned(), 1);
  snapshot.reset();
  EXPECT_EQ(device.pinned(), 0);
}

TEST(SnapshotTest, ADeviceThatFailsFailsTheCopyWithItsError) {
  for (const bool at_beginning : {false, true}) {
    LaterDevice device;
    device.fail(0, at_beginning, internal_error("the device is lost"));
    const auto snapshot = make_snapshot();
    const TestTensor tensor = TestTensor::random("t", DType::kInt8, {100});
    const Status status =
        snapshot->copy(std::vector<PackedCopy>{{device.holding(tensor.live), 64}}, 1);
    EXPECT_CODE(status, StatusCode::kInternal);
    EXPECT_THAT(status.message(), HasSubstr("the device is lost"));
  }
}

TEST(SnapshotTest, FillingItMeetsNoPageFault) {
  const auto snapshot = make_snapshot(64 * kMib, 2);
  const std::vector<std::byte> source = random_bytes(64 * kMib, 1);
  const int64_t before = page_faults();
  ASSERT_OK(snapshot->copy(std::vector{copy_of(source, 0)}, 1));
  EXPECT_LT(page_faults() - before, 16);  // Of huge pages there would be 32, of small ones 16384.
}

TEST(SnapshotTest, ACopyThatDoesNotFitIsRefusedBeforeAnyIsMade) {
  const auto snapshot = make_snapshot();
  const auto nbytes = ssize(snapshot->bytes());
  const std::vector<std::byte> source(4096, std::byte{7});
  for (const int64_t offset : {int64_t{-1}, nbytes - 4095, nbytes + 1}) {
    EXPECT_CODE(snapshot->copy(std::vector{copy_of(source, 0), copy_of(source, offset)}, 1),
                StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(snapshot->bytes()[0], std::byte{0});
}

TEST(SnapshotTest, MemoryThatTheSystemDoesNotHaveIsAnError) {
  HeapMemorySource heap;
  EXPECT_CODE(Snapshot::make(heap, 0, 1), StatusCode::kInvalidArgument);
  const auto snapshot = Snapshot::make(heap, int64_t{1} << 60, 1);
  EXPECT_CODE(snapshot, StatusCode::kStorage);
  EXPECT_THAT(snapshot.status().message(), HasSubstr("ENOMEM"));
}

TEST(PlaceInSnapshotTest, LongTensorsBeginAtPagesAndNoneOverlap) {
  int64_t end = 0;
  for (const int64_t nbytes : {3, 1 << 20, 0, 70, (1 << 20) + 1}) {
    const int64_t offset = place_in_snapshot(end, nbytes);
    EXPECT_GE(offset, end);
    EXPECT_EQ(offset % (nbytes >= 1 << 20 ? 4096 : 64), 0);
    EXPECT_LT(offset - end, 4096);
    end = offset + nbytes;
  }
}

using std::chrono::microseconds;

constexpr int64_t kChunk = int64_t{4} << 20;

TEST(HugePageBudgetTest, HugePagesThatAreFasterAreUsedForEver) {
  HugePageBudget budget(microseconds(1000), kChunk);
  for (int i = 0; i < 10'000; ++i) budget.add(microseconds(450), kChunk);
  EXPECT_FALSE(budget.is_spent());
}

TEST(HugePageBudgetTest, SlowHugePagesEndSoonHoweverSlowTheyAre) {
  for (const int64_t us : {1500, 3000, 7500, 9000, 100'000}) {
    HugePageBudget budget(microseconds(1000), kChunk);
    int64_t excess_us = 0;
    while (!budget.is_spent()) {
      budget.add(microseconds(us), kChunk);
      excess_us += us - 1000;
    }
    EXPECT_LE(microseconds(excess_us), HugePageBudget::kMaxExcess + microseconds(us)) << us;
  }
}

TEST(HugePageBudgetTest, TimeSlicesOfOtherProcessesDoNotEndHugePages) {
  HugePageBudget budget(microseconds(1000), kChunk);
  for (int i = 0; i < 100; ++i) {
    budget.add(microseconds(6000), kChunk);
    for (int j = 0; j < 10; ++j) budget.add(microseconds(450), kChunk);
  }
  EXPECT_FALSE(budget.is_spent());
}

TEST(HugePageBudgetTest, FastHugePagesEarnNoTimeForSlowOnes) {
  HugePageBudget budget(microseconds(1000), kChunk);
  for (int i = 0; i < 1000; ++i) budget.add(microseconds(450), kChunk);
  budget.add(HugePageBudget::kMaxExcess + microseconds(1001), kChunk);
  EXPECT_TRUE(budget.is_spent());
}

TEST(HugePageBudgetTest, ShorterChunksAreComparedByTheirLength) {
  HugePageBudget budget(microseconds(1000), kChunk);
  for (int i = 0; i < 1000; ++i) budget.add(microseconds(240), kChunk / 4);
  EXPECT_FALSE(budget.is_spent());
  for (int i = 0; i < 100; ++i) budget.add(microseconds(900), kChunk / 4);
  EXPECT_TRUE(budget.is_spent());
}

}  // namespace
}  // namespace torch_ckpt::snapshot_test
