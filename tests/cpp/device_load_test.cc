// Loads to tensors of a device that copies out of the buffers on its own time. Buffers are small
// and few, and each is read into again as soon as it may be.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <random>
#include <string>
#include <vector>

#include "engine/load/load_job.h"
#include "support/indexed_checkpoint.h"
#include "support/later_device.h"
#include "support/memory_file_system.h"
#include "support/saved_checkpoint.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::device_load_test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TensorRequest on(const LaterDevice& device, TensorRequest request) {
  request.live = device.holding(request.live);
  return request;
}

// Boxes of all tensors, in views of something larger, on two devices and on the CPU.
void expect_random_boxes_arrive(uint32_t seed, Indexed& a, LoadJob& job) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const LaterDevice devices[] = {LaterDevice(static_cast<int>(seed % 5)), LaterDevice(1, 1 << 20)};
  std::vector<TestTensor> views;
  std::vector<std::vector<std::byte>> expected;
  std::vector<TensorRequest> requests;
  for (size_t i = 0; i < 3 * a.saved.size(); ++i) {
    const TestTensor& saved = a.saved[i % a.saved.size()];
    const bool whole_rows = pick(random, 2) == 0;
    Dims offsets;
    Dims sizes;
    Dims around;
    for (const int64_t size : saved.live.sizes) {
      const bool all = whole_rows && !offsets.empty();
      offsets.push_back(all ? 0 : pick(random, size + 1));
      sizes.push_back(all ? size : pick(random, size - offsets.back() + 1));
      around.push_back(sizes.back() + pick(random, 3));
    }
    TestTensor view = TestTensor::random(saved.live.name, DType::kFloat32, around, seed + 100)
                          .narrowed(Dims(sizes.size(), 0), sizes);
    if (!whole_rows && sizes.size() > 1) {
      std::swap(around[0], around[1]);
      view = TestTensor::random(saved.live.name, DType::kFloat32, around, seed + 100)
                 .transposed(0, 1)
                 .narrowed(Dims(sizes.size(), 0), sizes);
    }
    std::vector<std::byte> memory = *view.memory;
    const TestTensor source = saved.narrowed(offsets, sizes);
    for_each_index(sizes, [&](const Dims& index) {
      std::memcpy(memory.data() + dot(index, view.live.strides),
                  source.live.data + dot(index, source.live.strides), 4);
    });
    const TensorRequest request = part(a.slices[i % a.slices.size()], offsets, view);
    const int64_t where = pick(random, 3);
    requests.push_back(where == 2 ? request : on(devices[where], request));
    views.push_back(std::move(view));
    expected.push_back(std::move(memory));
  }
  ASSERT_OK_AND_ASSIGN(const LoadResult result, job.run(requests, {}));
  EXPECT_THAT(result.outcomes, Each(Outcome::kLoaded));
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_TRUE(*views[i].memory == expected[i]) << describe(requests[i].slice);
  }
  for (const LaterDevice& device : devices) EXPECT_EQ(device.pending(), 0);
}

TEST(DeviceLoadTest, RandomBoxesArriveOnDevices) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    Indexed a({.alignment = seed % 2 == 0 ? 4096 : 1, .resident = seed % 3 == 0, .seed = seed});
    LoadOptions options = Indexed::options(seed % 4 != 0);
    if (seed % 5 == 0) options.block_nbytes = 300 << 10;  // For ranges that are read by themselves.
    options.buffer_nbytes = 4 * options.block_nbytes;
    // With an index, and without one, by the frames and their checksums.
    ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(a.fs, kCheckpoint, options,
                                                       seed % 3 == 1 ? nullptr : opened(*a.index)));
    ASSERT_NO_FATAL_FAILURE(expect_random_boxes_arrive(seed, a, *job));
  }
}

TEST(DeviceLoadTest, AJobGoesFromTheCpuToADeviceAndBack) {
  Indexed a;
  ASSERT_OK_AND_ASSIGN(const auto job,
                       LoadJob::make(a.fs, kCheckpoint, Indexed::options(), opened(*a.index)));
  const LaterDevice device;
  for (const bool on_device : {false, true, false, true}) {
    const TestTensor loaded = a.destination(3);
    const TensorRequest request = whole(a.slices[3], loaded);
    ASSERT_OK(job->run(std::vector{on_device ? on(device, request) : request}, {}));
    EXPECT_TRUE(loaded.packed() == a.saved[3].packed());
  }
  EXPECT_EQ(device.from_elsewhere(), 0);
}

TEST(DeviceLoadTest, ThousandsOfSmallTensorsAreBegunReadByRead) {
  MemoryFileSystem fs;
  std::vector<TestTensor> saved;
  for (uint32_t i = 0; i < 2000; ++i) {
    saved.push_back(TestTensor::random("t" + std::to_string(i), DType::kInt16, {1 + i % 30}, i));
  }
  const std::vector<StoredSlice> slices = save_file(fs, "a", saved);
  const LaterDevice device;
  std::vector<TestTensor> loaded;
  std::vector<TensorRequest> requests;
  for (size_t i = 0; i < saved.size(); ++i) {
    loaded.push_back(TestTensor::random("t", DType::kInt16, saved[i].live.sizes, 7));
    requests.push_back(on(device, whole(slices[i], loaded[i])));
  }
  const LoadOptions options = {.buffer_nbytes = 1 << 20, .block_nbytes = 256 << 10, .threads = 2};
  ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(fs, kCheckpoint, options));
  const int64_t before = std::ssize(fs.operations());
  ASSERT_OK(job->run(requests, {}));
  EXPECT_LE(device.begun(), std::ssize(fs.operations()) - before);
  EXPECT_LE(device.begun(), 20);
  EXPECT_EQ(device.copied(), 2000);
  EXPECT_EQ(device.from_elsewhere(), 0);
  for (size_t i = 0; i < saved.size(); ++i) {
    ASSERT_TRUE(loaded[i].packed() == saved[i].packed()) << i;
  }
}

TEST(DeviceLoadTest, ReadingGoesOnWhileADeviceCopiesAndNeverBeyondTheBuffers) {
  MemoryFileSystem fs;
  const auto saved = TestTensor::random("w", DType::kFloat32, {1000, 1000}, 1);
  const StoredSlice slice = save_file(fs, "a", {saved})[0];
  const auto loaded = TestTensor::random("w", DType::kFloat32, {1000, 1000}, 2);
  const LaterDevice device(/*asked_before_done=*/1000);  // Only when it is waited for.
  const LoadOptions options = {.buffer_nbytes = 6 << 16, .block_nbytes = 64 << 10, .threads = 1};
  ASSERT_OK(load(fs, {on(device, whole(slice, loaded))}, {}, options));
  EXPECT_TRUE(loaded.packed() == saved.packed());
  EXPECT_GE(device.begun(), 60);
  EXPECT_EQ(device.from_elsewhere(), 0);
  EXPECT_GE(device.most_pending(), 3);
  EXPECT_LE(device.most_pending(), 6);
}

TEST(DeviceLoadTest, WhenADeviceFailsSoDoesTheLoadAndNamesTheTensor) {
  for (const bool at_beginning : {false, true}) {
    for (int64_t n = 0; n < 6; ++n) {
      SCOPED_TRACE(n);
      Indexed a;
      LaterDevice device;
      device.fail(n, at_beginning, internal_error("the device is lost"));
      std::vector<TestTensor> loaded;
      std::vector<TensorRequest> requests;
      for (size_t i = 0; i < a.saved.size(); ++i) {
        loaded.push_back(a.destination(i));
        requests.push_back(on(device, whole(a.slices[i], loaded[i])));
      }
      const Status status = a.load(requests).status();
      EXPECT_CODE(status, StatusCode::kInternal);
      EXPECT_THAT(status.message(),
                  MatchesRegex("cannot load 't[0-9]'(, 't[0-9]')*: the device is lost"));
      EXPECT_EQ(device.pending(), 0);
    }
  }
}

TEST(DeviceLoadTest, BuffersThatCannotBeHadAreAnErrorThatNamesATensor) {
  Indexed a;
  LaterDevice device;
  device.fail_buffers(errno_status(ENOMEM, "cannot pin 4096 bytes"));
  const TestTensor loaded = a.destination(3);
  const Status status = a.load({on(device, whole(a.slices[3], loaded))}).status();
  EXPECT_CODE(status, StatusCode::kStorage);
  EXPECT_THAT(status.message(), HasSubstr("cannot load 't3': cannot pin 4096 bytes"));
}

TEST(DeviceLoadTest, WhenAReadFailsTheDeviceIsWaitedFor) {
  for (int64_t n = 0; n < 12; ++n) {
    SCOPED_TRACE(n);
    Indexed a;
    const LaterDevice device(1000);
    std::vector<TestTensor> loaded;
    std::vector<TensorRequest> requests;
    for (size_t i = 0; i < a.saved.size(); ++i) {
      loaded.push_back(a.destination(i));
      requests.push_back(on(device, whole(a.slices[i], loaded[i])));
    }
    a.fs.fail_operation(n, errno_status(EIO, "cannot read"));
    EXPECT_CODE(a.load(requests).status(), StatusCode::kStorage);
    EXPECT_TRUE(a.fs.clear_fault());
    EXPECT_EQ(device.pending(), 0);
  }
}

TEST(DeviceLoadTest, DamagedBytesNeverReachADevice) {
  Indexed a;
  const size_t i = 3;
  const int64_t at = payload_offset(a.fs, a.slices[i]) + 5 * kSumBlock;
  flip_bit(a.fs, "a", at);
  const LaterDevice device;
  const TestTensor loaded = a.destination(i);
  const TensorRequest request = {a.slices[i], {{0, 0}, {300, 400}}, loaded.live};
  const Status status = a.load({on(device, request)}).status();
  EXPECT_CODE(status, StatusCode::kCorruption);
  EXPECT_THAT(status.message(), HasSubstr("'t3'"));
  const std::string stored = *a.fs.contents("step-1/a");
  EXPECT_EQ(loaded.packed().find(stored.substr(static_cast<size_t>(at), 64)), std::string::npos);
}

TEST(DeviceLoadTest, WithoutAnIndexAPayloadIsCheckedOnItsWayToADevice) {
  for (const Dims& sizes : {Dims{30, 20}, Dims{300, 400}}) {
    MemoryFileSystem fs;
    const auto saved = TestTensor::random("w", DType::kFloat32, sizes, 1);
    const StoredSlice slice = save_file(fs, "a", {saved})[0];
    flip_bit(fs, "a", payload_offset(fs, slice) + 100);
    const auto loaded = TestTensor::random("w", DType::kFloat32, sizes, 2);
    const LaterDevice device;
    const LoadOptions options = {.buffer_nbytes = 1 << 20, .block_nbytes = 256 << 10};
    EXPECT_CODE(load(fs, {on(device, whole(slice, loaded))}, {}, options), StatusCode::kCorruption);
  }
}

}  // namespace
}  // namespace torch_ckpt::device_load_test
