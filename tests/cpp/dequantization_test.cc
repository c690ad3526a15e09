#include "engine/dequantization.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "device/device.h"
#include "engine/unpacking.h"
#include "support/later_device.h"
#include "support/pack_on_cpu.h"
#include "support/status_matchers.h"

namespace torch_ckpt {
namespace {

constexpr float kE2M1[] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                           -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

int64_t numel(const Dims& sizes) { return *checked_numel(sizes); }

// A random quantised tensor with its bytes and scales, and the products one by one.
struct Case {
  explicit Case(uint64_t seed) : random(seed) {
    const int64_t ndim = draw(1, 3);
    const bool is_packed = draw(0, 1) == 1;
    tensor.dtype = is_packed ? DType::kFloat4E2M1FNX2 : DType::kInt8;
    for (int64_t d = 0; d < ndim; ++d) {
      tensor.sizes.push_back(draw(1, 9));
      tensor.block.push_back(draw(1, 4));
    }
    if (is_packed) tensor.sizes.back() *= 2;
    tensor.is_transposed = ndim > 1 && draw(0, 1) == 1;
    for (size_t d = 0; d < tensor.sizes.size(); ++d) {
      scale_sizes.push_back((tensor.sizes[d] + tensor.block[d] - 1) / tensor.block[d]);
    }
    bytes.resize(static_cast<size_t>(numel(tensor.sizes) / (is_packed ? 2 : 1)));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(draw(0, 255));
    scales.resize(static_cast<size_t>(numel(scale_sizes)));
    for (float& scale : scales) scale = static_cast<float>(draw(1, 1000)) / 64;
    tensor.scales.nbytes = std::ssize(scales) * 4;
    tensor.targets = {DType::kFloat32};
  }

  int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  }

  // The product of the number at an index of the stored tensor.
  float product(const Dims& index) const {
    int64_t at = 0;
    int64_t scale = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      at = at * tensor.sizes[d] + index[d];
      scale = scale * scale_sizes[d] + index[d] / tensor.block[d];
    }
    float value = 0;
    if (tensor.is_packed()) {
      const auto byte = std::to_integer<uint32_t>(bytes[static_cast<size_t>(at / 2)]);
      value = kE2M1[at % 2 == 0 ? byte & 0xf : byte >> 4];
    } else {
      value = static_cast<float>(std::to_integer<int8_t>(bytes[static_cast<size_t>(at)]));
    }
    return value * scales[static_cast<size_t>(scale)];
  }

  std::mt19937_64 random;
  QuantizedTensor tensor;
  Dims scale_sizes;
  std::vector<std::byte> bytes;
  std::vector<float> scales;
};

Dims swapped(Dims dims, bool swap) {
  if (swap) std::swap(dims[dims.size() - 1], dims[dims.size() - 2]);
  return dims;
}

// Gives the dequantisation its scales, as LoadJob reads them.
void set_scales(const Case& one, Dequantization& dequantization) {
  const Box& box = dequantization.scale_box();
  dequantization.scales().resize(static_cast<size_t>(dequantization.scale_nbytes()));
  Dims strides = contiguous_strides(one.scale_sizes);
  Dims packed = contiguous_strides(box.sizes);
  for (int64_t& stride : strides) stride *= 4;
  for (int64_t& stride : packed) stride *= 4;
  copy_on_cpu(copy_of_box(box, 4, 0, strides, packed),
              reinterpret_cast<const std::byte*>(one.scales.data()),
              dequantization.scales().data());
}

TEST(DequantizationTest, AnyBoxInAnyPiecesHasTheProductOfEachNumber) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Case one(seed);
    const Dims seen = swapped(one.tensor.sizes, one.tensor.is_transposed);
    Box box;
    for (const int64_t size : seen) {
      box.offsets.push_back(one.draw(0, size - 1));
      box.sizes.push_back(one.draw(1, size - box.offsets.back()));
    }
    auto made = Dequantization::make(one.tensor, box, DType::kFloat32, "w");
    ASSERT_TRUE(made.ok()) << made.status().message();
    set_scales(one, *made);

    Dims strides(box.sizes.size());  // Of a target whose last dimension may not be the nearest.
    std::vector<size_t> order(strides.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = d;
    std::shuffle(order.begin(), order.end(), one.random);
    int64_t stride = 4;
    for (const size_t d : order) {
      strides[d] = stride;
      stride *= box.sizes[d];
    }
    std::vector<float> direct(static_cast<size_t>(numel(box.sizes)), NAN);
    std::vector<float> copied = direct;
    std::vector<float> later = direct;
    const LaterDevice device(static_cast<int>(one.draw(0, 3)));
    const std::string name = "w";
    std::byte* const there = LaterDevice::address(reinterpret_cast<std::byte*>(later.data()));
    Unpacking unpacking;
    for (const QuantizedPiece& piece : made->cut(one.draw(1, 40), one.draw(0, 8))) {
      const std::byte* from = one.bytes.data() + piece.range.begin;
      ASSERT_LE(piece.range.end, std::ssize(one.bytes));
      made->run(piece.box, from, strides, reinterpret_cast<std::byte*>(direct.data()));
      std::vector<float> row_major(static_cast<size_t>(numel(piece.box.sizes)));
      made->run_row_major(piece.box, from, reinterpret_cast<std::byte*>(row_major.data()));
      copy_on_cpu(made->copy_of(piece.box, strides),
                  reinterpret_cast<const std::byte*>(row_major.data()),
                  reinterpret_cast<std::byte*>(copied.data()));
      ASSERT_TRUE(
          unpacking.add_dequantized(device, name, there, strides, *made, piece.box, from).ok());
    }
    ASSERT_TRUE(unpacking.start().ok());
    for (auto done = unpacking.done(); !done.ok() || !*done; done = unpacking.done()) {
      ASSERT_TRUE(done.ok());
    }
    ASSERT_TRUE(unpacking.wait().ok());
    ASSERT_EQ(device.pending(), 0);
    ASSERT_GT(device.multiplied(), 0);
    ASSERT_EQ(device.copied(), 0);
    const Dims counts = contiguous_strides(box.sizes);
    for (int64_t i = 0; i < numel(box.sizes); ++i) {
      Dims index;
      int64_t at = 0;
      for (size_t d = 0; d < counts.size(); ++d) {
        const int64_t within = i / counts[d] % box.sizes[d];
        index.push_back(box.offsets[d] + within);
        at += within * strides[d] / 4;
      }
      const float wanted = one.product(swapped(index, one.tensor.is_transposed));
      ASSERT_EQ(direct[static_cast<size_t>(at)], wanted) << "seed " << seed;
      ASSERT_EQ(copied[static_cast<size_t>(at)], wanted) << "seed " << seed;
      ASSERT_EQ(later[static_cast<size_t>(at)], wanted) << "seed " << seed;
    }
  }
}

bool is_nan(uint32_t bits, DType dtype) {
  if (dtype == DType::kFloat32) return (bits & 0x7fffffff) > 0x7f800000;
  return (bits & 0x7fff) > (dtype == DType::kFloat16 ? 0x7c00U : 0x7f80U);
}

// A matrix with one scale for each column.
struct Columns {
  explicit Columns(DType dtype) {
    tensor = {.dtype = dtype,
              .sizes = {128, 8},
              .block = {128, 1},
              .scales = {"f", 0, 32, "w_scale"},
              .targets = {DType::kFloat32}};
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i / 4);
  }
  QuantizedTensor tensor;
  std::vector<std::byte> codes = std::vector<std::byte>(1024);
};

TEST(DequantizationTest, ADeviceRoundsEveryProductAsTheCpuDoes) {
  const std::vector<float> scales = {1.0F,  0.37F,    1e-7F,     3e-38F,
                                     1e36F, -65504.F, 0x1p-149F, INFINITY};
  for (const DType dtype : {DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kFloat8E4M3FNUZ,
                            DType::kFloat8E5M2FNUZ, DType::kInt8}) {
    for (const DType to : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const Columns one(dtype);
      auto made = Dequantization::make(one.tensor, {{0, 0}, {128, 8}}, to, "w");
      ASSERT_TRUE(made.ok());
      made->scales().resize(32);
      std::memcpy(made->scales().data(), scales.data(), 32);
      const Dims strides = {8 * itemsize(to), itemsize(to)};
      std::vector<std::byte> wanted(static_cast<size_t>(1024 * itemsize(to)));
      std::vector<std::byte> found = wanted;
      for (const QuantizedPiece& piece : made->cut(1000, 0)) {
        const std::byte* from = one.codes.data() + piece.range.begin;
        made->run(piece.box, from, strides, wanted.data());
        const auto table = made->for_device(piece.box, from, strides, found.data());
        ASSERT_TRUE(table.has_value());
        multiply_on_cpu(table->table, table->codes, table->values, table->scales);
      }
      for (size_t i = 0; i < wanted.size(); i += static_cast<size_t>(itemsize(to))) {
        uint32_t a = 0;
        uint32_t b = 0;
        std::memcpy(&a, wanted.data() + i, static_cast<size_t>(itemsize(to)));
        std::memcpy(&b, found.data() + i, static_cast<size_t>(itemsize(to)));
        if (is_nan(a, to)) {  // With any bits.
          ASSERT_TRUE(is_nan(b, to));
        } else {
          ASSERT_EQ(a, b) << dtype_info(dtype).name << " to " << dtype_info(to).name << " " << i;
        }
      }
    }
  }
}

TEST(DequantizationTest, AFailedDeviceIsAnErrorThatNamesTheTensor) {
  const Columns one(DType::kInt8);
  auto made = Dequantization::make(one.tensor, {{0, 0}, {128, 8}}, DType::kFloat32, "w");
  ASSERT_TRUE(made.ok());
  made->scales().resize(32);
  std::vector<float> out(1024);
  for (const bool at_beginning : {true, false}) {
    LaterDevice device;
    device.fail(0, at_beginning, Status(StatusCode::kInternal, "the GPU has burnt"));
    const std::string name = "w";
    Unpacking unpacking;
    const Status added = unpacking.add_dequantized(
        device, name, LaterDevice::address(reinterpret_cast<std::byte*>(out.data())), {32, 4},
        *made, {{0, 0}, {128, 8}}, one.codes.data());
    EXPECT_EQ(added.ok(), !at_beginning);
    const Status status = added.ok() ? unpacking.wait() : added;
    EXPECT_EQ(status.message(), "cannot load 'w': the GPU has burnt");
  }
}

TEST(DequantizationTest, TheCpuMultipliesForADeviceThatDoesNotOrHasNoMemory) {
  const Columns one(DType::kInt8);
  auto made = Dequantization::make(one.tensor, {{0, 0}, {128, 8}}, DType::kFloat32, "w");
  ASSERT_TRUE(made.ok());
  made->scales().resize(32);
  const std::vector<float> scales(8, 2.0F);
  std::memcpy(made->scales().data(), scales.data(), 32);
  for (const Status& why : {unsupported("no products"), errno_status(ENOMEM, "no memory")}) {
    std::vector<float> out(1024);
    LaterDevice device;
    device.fail(0, true, why);
    const std::string name = "w";
    Unpacking unpacking;
    ASSERT_TRUE(unpacking
                    .add_dequantized(device, name,
                                     LaterDevice::address(reinterpret_cast<std::byte*>(out.data())),
                                     {32, 4}, *made, {{0, 0}, {128, 8}}, one.codes.data())
                    .ok());
    ASSERT_TRUE(unpacking.wait().ok());
    EXPECT_EQ(device.copied(), 1);
    EXPECT_EQ(out[1023], -2.0F);
  }
}

// 2^32 + 8 numbers in blocks of 2^32, of which a piece has the last four and the first four.
TEST(DequantizationTest, ADeviceGetsNoBlocksTooLongForItsTable) {
  constexpr int64_t kBlock = int64_t{1} << 32;
  const QuantizedTensor tensor{.dtype = DType::kInt8,
                               .sizes = {1, kBlock + 8},
                               .block = {1, kBlock},
                               .scales = {"f", 0, 8, "w_scale"},
                               .targets = {DType::kFloat32}};
  const Box box = {{0, kBlock - 4}, {1, 8}};
  auto made = Dequantization::make(tensor, box, DType::kFloat32, "w");
  ASSERT_TRUE(made.ok());
  made->scales().resize(8);
  const std::vector<std::byte> codes(8, std::byte{1});
  std::byte out[32];
  EXPECT_FALSE(made->for_device(box, codes.data(), {32, 4}, out).has_value());
}

TEST(DequantizationTest, ContradictionsAreErrorsThatNameTheTensor) {
  QuantizedTensor tensor{.dtype = DType::kFloat8E4M3FN,
                         .sizes = {4, 6},
                         .block = {2, 3},
                         .scales = {"f", 0, 16, "w_scale"},
                         .targets = {DType::kFloat32}};
  const auto code_of = [&](const Box& box, DType to) {
    const auto made = Dequantization::make(tensor, box, to, "w");
    EXPECT_NE(made.status().message().find("'w'"), std::string::npos);
    return made.status().code();
  };
  const Box whole = {{0, 0}, {4, 6}};
  EXPECT_TRUE(Dequantization::make(tensor, whole, DType::kFloat32, "w").ok());
  EXPECT_EQ(code_of({{0, 1}, {4, 6}}, DType::kFloat32), StatusCode::kMismatch);
  EXPECT_EQ(code_of({{0}, {4}}, DType::kFloat32), StatusCode::kMismatch);
  EXPECT_EQ(code_of(whole, DType::kFloat64), StatusCode::kUnsupported);
  tensor.scales.nbytes = 20;
  EXPECT_EQ(code_of(whole, DType::kFloat32), StatusCode::kCorruption);
  tensor.block = {2, 0};
  EXPECT_EQ(code_of(whole, DType::kFloat32), StatusCode::kCorruption);
}

}  // namespace
}  // namespace torch_ckpt
