// What goes out of one buffer, to devices that copy at once and to those that take their time.

#include "engine/unpacking.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/later_device.h"
#include "support/pack_cases.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::unpacking_test {
namespace {

// Addresses as a device has them.
std::byte* address_on(const Device& device, std::byte* address) {
  return device.is_host() ? address : LaterDevice::address(address);
}

TEST(UnpackingTest, EveryDeviceLeavesTheBytesThatTheCpuDoes) {
  const LaterDevice later;
  for (const Device* device : {&cpu_device(), static_cast<const Device*>(&later)}) {
    for (uint32_t seed = 0; seed < 300; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      const PackCase given = random_pack_case(seed, PackDirection::kUnpack);
      std::vector<std::byte> tensors = given.tensors;
      const std::vector<TensorCopy> copies = given.copies_in(address_on(*device, tensors.data()));
      ASSERT_OK_AND_ASSIGN(const auto event, device->unpack(copies, given.staging));
      if (event != nullptr) {
        ASSERT_OK(event->wait());
      }
      ASSERT_TRUE(tensors == packed_by_cpu(given).first);
    }
  }
}

TEST(UnpackingTest, CopiesToManyTensorsOfADeviceAreBegunTogether) {
  const LaterDevice device;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const PackCase given = random_pack_case(seed, PackDirection::kUnpack);
    const std::string name = "w";
    std::vector<std::byte> tensors = given.tensors;
    const int64_t before = device.begun();
    {
      Unpacking unpacking{Bytes(given.staging)};
      for (const TensorCopy& copy : given.copies_in(address_on(device, tensors.data()))) {
        ASSERT_OK(unpacking.add(device, name, copy.tensor, copy.copy, given.staging.data()));
      }
      EXPECT_TRUE(tensors == given.tensors) << "copied before it was started";
      ASSERT_OK(unpacking.start());
      EXPECT_EQ(device.begun(), before + 1);
      int questions = 0;
      for (bool done = false; !done; ++questions) {
        ASSERT_OK_AND_ASSIGN(done, unpacking.done());
      }
      EXPECT_EQ(questions, 4);
    }
    ASSERT_TRUE(tensors == packed_by_cpu(given).first);
  }
}

// As the rows of what unfold() makes, and the elements of what expand() does, share bytes.
TEST(UnpackingTest, ElementsThatShareBytesOfTheBufferArrive) {
  const std::vector<std::byte> buffer = random_bytes(4000, 1);
  const LaterDevice device;
  for (const Dims& strides : {Dims{12, 4}, Dims{0, 0}}) {
    const StridedCopy copy = {.itemsize = 4,
                              .sizes = {5, 10},
                              .src_offset = 8,
                              .src_strides = strides,
                              .dst_strides = {40, 4}};
    std::vector<std::byte> expected(200);
    copy_on_cpu(copy, buffer.data() + 16, expected.data());
    std::vector<std::byte> tensor(200);
    Unpacking unpacking{Bytes(buffer)};
    const std::string name = "w";
    ASSERT_OK(
        unpacking.add(device, name, address_on(device, tensor.data()), copy, buffer.data() + 16));
    ASSERT_OK(unpacking.start());
    ASSERT_OK(unpacking.wait());
    EXPECT_TRUE(tensor == expected);
  }
}

TEST(UnpackingTest, WhatWasBegunIsWaitedForByWhoeverLetsItGo) {
  const LaterDevice device;
  const std::vector<std::byte> buffer = random_bytes(64, 1);
  std::vector<std::byte> tensor(64);
  const StridedCopy copy = {.sizes = {64}, .src_strides = {1}, .dst_strides = {1}};
  const std::string name = "w";
  {
    Unpacking first{Bytes(buffer)};
    ASSERT_OK(first.add(device, name, address_on(device, tensor.data()), copy, buffer.data()));
    ASSERT_OK(first.start());
    Unpacking second;
    second = std::move(first);
    EXPECT_EQ(device.pending(), 1);
  }
  EXPECT_EQ(device.pending(), 0);
  EXPECT_TRUE(tensor == buffer);
}

}  // namespace
}  // namespace torch_ckpt::unpacking_test
