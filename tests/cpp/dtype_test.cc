#include "base/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace torch_ckpt::dtype_test {
namespace {

TEST(DTypeTest, EveryDtypeIsFoundByItsNameAndByItsTypedStorage) {
  std::set<std::string_view> names;
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const DTypeInfo& info = dtype_info(dtype);
    EXPECT_EQ(info.dtype, dtype);
    EXPECT_EQ(dtype_from_name(info.name), dtype) << info.name;
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    // The engine cuts payloads at multiples of 64 bytes, and never inside an element.
    const int64_t size = itemsize(dtype);
    EXPECT_TRUE(size > 0 && size <= 16 && (size & (size - 1)) == 0) << size;
    if (info.storage.empty()) continue;
    EXPECT_EQ(dtype_from_storage(info.storage), dtype) << info.storage;
    EXPECT_TRUE(names.insert(info.storage).second) << info.storage;
  }
}

TEST(DTypeTest, ElementSizesAreThoseOfPytorch) {
  EXPECT_EQ(itemsize(DType::kBool), 1);
  EXPECT_EQ(itemsize(DType::kFloat8E4M3FN), 1);
  EXPECT_EQ(itemsize(DType::kBFloat16), 2);
  EXPECT_EQ(itemsize(DType::kComplex32), 4);
  EXPECT_EQ(itemsize(DType::kUInt64), 8);
  EXPECT_EQ(itemsize(DType::kComplex64), 8);
  EXPECT_EQ(itemsize(DType::kComplex128), 16);
}

TEST(DTypeTest, UnknownNamesAreNoDtype) {
  EXPECT_EQ(dtype_from_name("qint8"), std::nullopt);
  EXPECT_EQ(dtype_from_name("FloatStorage"), std::nullopt);
  EXPECT_EQ(dtype_from_name(""), std::nullopt);
  EXPECT_EQ(dtype_from_storage("QInt8Storage"), std::nullopt);
  EXPECT_EQ(dtype_from_storage("float32"), std::nullopt);
  // Stands for "has none" in the table, and must not find those.
  EXPECT_EQ(dtype_from_storage(""), std::nullopt);
}

}  // namespace
}  // namespace torch_ckpt::dtype_test
