#include "engine/metadata_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>

#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::metadata_file_test {
namespace {

using ::testing::HasSubstr;

constexpr char kId[] = "0123456789abcdef";

std::string pickle_of(int64_t nbytes) {
  return std::string(as_text(random_bytes(nbytes, 3))) + ".";
}

Result<std::shared_ptr<MetadataFile>> opened_file(MemoryFileSystem& fs, const std::string& text) {
  fs.put("c/.metadata", text);
  return MetadataFile::open(fs, "c/.metadata");
}

TEST(MetadataFileTest, TheTrailerTellsWhatThePickleIsWithoutReadingIt) {
  MemoryFileSystem fs;
  const std::string pickle = pickle_of(3 << 20);
  ASSERT_OK_AND_ASSIGN(const auto file, opened_file(fs, metadata_with_trailer(pickle, kId)));
  int64_t read_nbytes = 0;
  for (const Operation& operation : fs.operations()) read_nbytes += operation.nbytes;
  EXPECT_EQ(read_nbytes, kMetadataTrailerNbytes);
  ASSERT_TRUE(file->trailer().has_value());
  EXPECT_EQ(*file->trailer(), (MetadataTrailer{kId, FileDigest::of(as_bytes(pickle))}));
  EXPECT_TRUE(as_text(*file->read_pickle()) == pickle);
  EXPECT_OK(file->check_pickle());
}

TEST(MetadataFileTest, WhatStockHasWrittenIsReadWhole) {
  for (const std::string& text : {pickle_of(5), pickle_of(500), std::string()}) {
    MemoryFileSystem fs;
    ASSERT_OK_AND_ASSIGN(const auto file, opened_file(fs, text));
    EXPECT_FALSE(file->trailer().has_value());
    EXPECT_TRUE(as_text(*file->read_pickle()) == text);
    EXPECT_CODE(file->check_pickle(), StatusCode::kCorruption);
  }
}

TEST(MetadataFileTest, AFileWithAnyFlippedBitInItsTrailerIsReadWhole) {
  MemoryFileSystem fs;
  const std::string pickle = pickle_of(200);
  const std::string whole = metadata_with_trailer(pickle, kId);
  for (size_t bit = 0; bit < 8 * kMetadataTrailerNbytes; ++bit) {
    std::string damaged = whole;
    damaged[pickle.size() + bit / 8] ^= static_cast<char>(1 << bit % 8);
    ASSERT_OK_AND_ASSIGN(const auto file, opened_file(fs, damaged));
    EXPECT_FALSE(file->trailer().has_value());
    EXPECT_TRUE(as_text(*file->read_pickle()) == damaged) << "bit " << bit;
  }
}

TEST(MetadataFileTest, ATrailerOfAnotherLengthIsNone) {
  MemoryFileSystem fs;
  const std::string whole = metadata_with_trailer(pickle_of(200), kId);
  for (const std::string& text : {whole.substr(1), "x" + whole, whole + "x",
                                  whole.substr(0, whole.size() - 1), whole.substr(201)}) {
    ASSERT_OK_AND_ASSIGN(const auto file, opened_file(fs, text));
    EXPECT_FALSE(file->trailer().has_value());
    EXPECT_CODE(file->check_pickle(), StatusCode::kCorruption);
  }
}

TEST(MetadataFileTest, ANewerTrailerIsUnsupported) {
  std::string whole = metadata_with_trailer(pickle_of(200), kId);
  const size_t begin = whole.size() - kMetadataTrailerNbytes;
  whole[begin + 8] = 2;
  const uint64_t sum = xxh3(as_bytes(whole).subspan(begin, kMetadataTrailerNbytes - 8));
  std::memcpy(whole.data() + whole.size() - 8, &sum, 8);
  MemoryFileSystem fs;
  ASSERT_OK_AND_ASSIGN(const auto file, opened_file(fs, whole));
  EXPECT_CODE(file->trailer_status(), StatusCode::kUnsupported);
}

TEST(MetadataFileTest, AFlippedBitOfThePickleIsFoundByWhoeverReadsIt) {
  MemoryFileSystem fs;
  const std::string pickle = pickle_of(3 << 20);
  for (const size_t at : {size_t{0}, size_t{1} << 20, pickle.size() - 1}) {
    std::string damaged = metadata_with_trailer(pickle, kId);
    damaged[at] ^= 1;
    ASSERT_OK_AND_ASSIGN(const auto file, opened_file(fs, damaged));
    ASSERT_TRUE(file->trailer().has_value());
    EXPECT_CODE(file->read_pickle(), StatusCode::kCorruption);
    EXPECT_CODE(file->check_pickle(), StatusCode::kCorruption);
    EXPECT_THAT(file->check_pickle().message(), HasSubstr("c/.metadata"));
    EXPECT_TRUE(as_text(*file->read_pickle(/*verify=*/false)) == damaged.substr(0, pickle.size()));
  }
}

TEST(MetadataFileTest, AFileThatCannotBeReadIsNoFileWithoutATrailer) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", metadata_with_trailer(pickle_of(200), kId));
  for (int64_t n = 0; n < 3; ++n) {
    fs.fail_operation(n, errno_status(EIO, "cannot go on"));
    EXPECT_CODE(MetadataFile::open(fs, "c/.metadata"), StatusCode::kStorage) << n;
  }
}

}  // namespace
}  // namespace torch_ckpt::metadata_file_test
