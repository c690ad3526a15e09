#include "base/dequantize.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "base/dequantize_variant.h"

namespace torch_ckpt {
namespace {

constexpr float kScales[] = {1.0F,
                             -0.37F,
                             3e-5F,
                             1e-44F,
                             0x1p127F,
                             0x1p-127F,
                             3e38F,
                             0.0F,
                             -0.0F,
                             std::numeric_limits<float>::infinity(),
                             std::numeric_limits<float>::quiet_NaN()};

bool is_nan(const std::byte* product, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, product, sizeof(value));
    return std::isnan(value);
  }
  uint16_t bits = 0;
  std::memcpy(&bits, product, sizeof(bits));
  return (bits & 0x7fff) > (dtype == DType::kFloat16 ? 0x7c00 : 0x7f80);
}

TEST(DequantizeTest, VariantsGiveTheBitsOfTheReferenceForEveryCodeAndLength) {
  const DequantizeVariant* variant = dequantize_avx2();
  if (variant == nullptr) GTEST_SKIP() << "no variant on this CPU";
  std::vector<std::byte> codes(256 + 31);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i);
  for (const DType from : {DType::kFloat8E4M3FN, DType::kFloat8E5M2}) {
    for (const DType to : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const float scale : kScales) {
        for (const int64_t count : {1, 15, 16, 17, 287}) {
          const std::vector<float> scales(static_cast<size_t>(count), scale);
          const CodeRow row = {codes.data(), count, 3, 20, scales.data()};
          const auto size = static_cast<size_t>(itemsize(to));
          std::vector<std::byte> found(static_cast<size_t>(count) * size);
          std::vector<std::byte> expected(found.size());
          dequantize_row_by(variant, row, from, to, found.data());
          dequantize_row_by(nullptr, row, from, to, expected.data());
          for (size_t i = 0; i < found.size(); i += size) {
            if (is_nan(&expected[i], to)) {
              EXPECT_TRUE(is_nan(&found[i], to)) << i << " " << scale;
            } else {
              EXPECT_EQ(std::memcmp(&found[i], &expected[i], size), 0)
                  << "code " << i / size << " scale " << scale << " to " << dtype_info(to).name;
            }
          }
        }
      }
    }
  }
}

TEST(DequantizeTest, PackedNumbersKeepTheirValuesFromAnyBegin) {
  constexpr float kValues[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  std::vector<std::byte> packed(64);
  for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<std::byte>(i * 37 + 11);
  for (const int64_t begin : {0, 1, 2, 31}) {
    for (const int64_t count : {0, 1, 2, 33, 90}) {
      std::vector<std::byte> codes(static_cast<size_t>(count));
      expand_e2m1(packed.data(), begin, count, codes.data());
      for (int64_t i = 0; i < count; ++i) {
        const auto byte = std::to_integer<uint32_t>(packed[static_cast<size_t>(begin + i) / 2]);
        const uint32_t half = (begin + i) % 2 == 0 ? byte & 0xf : byte >> 4;
        const float wanted = (half & 8) != 0 ? -kValues[half & 7] : kValues[half & 7];
        const float one = 1.0F;
        float found = 0;
        dequantize_row({&codes[static_cast<size_t>(i)], 1, 0, 1, &one}, DType::kFloat8E5M2,
                       DType::kFloat32, reinterpret_cast<std::byte*>(&found));
        EXPECT_EQ(std::signbit(found), std::signbit(wanted));
        EXPECT_EQ(found, wanted);
      }
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
