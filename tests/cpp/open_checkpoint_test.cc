// Which index belongs to which metadata, in whatever state saves have left the directory.

#include "engine/open_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "support/memory_file_system.h"
#include "support/status_matchers.h"

namespace torch_ckpt {
namespace {

using ::testing::HasSubstr;

constexpr char kId[] = "0123456789abcdef";

std::string index_of(const std::string& metadata, const std::string& save_id = kId) {
  Index index;
  index.save_id = save_id;
  index.metadata = Seal::of(as_bytes(metadata));
  const auto bytes = write_index(index);
  EXPECT_OK(bytes);
  return std::string(as_text(*bytes));
}

TEST(OpenCheckpointTest, FindsTheIndexThatWasCommittedWithTheMetadata) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", "m");
  fs.put("c/.index", index_of("m"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_EQ(as_text(opened.metadata), "m");
  ASSERT_NE(opened.index, nullptr);
  EXPECT_EQ(opened.index->save_id, kId);
}

TEST(OpenCheckpointTest, FindsAnIndexThatStillHasItsPendingName) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", "new");
  fs.put("c/.index", index_of("old"));
  fs.put("c/.index.00000000aaaaaaaa", "torn");
  fs.put("c/.index.00000000bbbbbbbb", index_of("of a save that failed"));
  fs.put("c/.index." + std::string(kId), index_of("new"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  ASSERT_NE(opened.index, nullptr);
  EXPECT_EQ(opened.index->metadata, Seal::of(as_bytes("new")));
}

TEST(OpenCheckpointTest, AnIndexOfOtherMetadataIsNotTaken) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", "stock's");
  fs.put("c/.index", index_of("ours"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_EQ(opened.index, nullptr);
  ASSERT_NE(opened.other_index, nullptr);
  EXPECT_OK(opened.index_status);
}

TEST(OpenCheckpointTest, ADamagedIndexIsReportedWithItsName) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", "m");
  std::string damaged = index_of("m");
  damaged[30] ^= 1;
  fs.put("c/.index", damaged);
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_EQ(opened.index, nullptr);
  EXPECT_CODE(opened.index_status, StatusCode::kCorruption);
  EXPECT_THAT(opened.index_status.message(), HasSubstr("c/.index"));
}

// A hole costs a disk nothing, and memory as much as it claims.
TEST(OpenCheckpointTest, AnIndexOfAnotherLengthThanItsHeaderStatesIsNotRead) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", "m");
  fs.put("c/.index", index_of("m") + std::string(1 << 20, '\0'));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_CODE(opened.index_status, StatusCode::kCorruption);
  for (const Operation& operation : fs.operations()) EXPECT_LE(operation.nbytes, 4096);
}

// Commits another checkpoint at the moment when the index of the first is asked for.
class OvertakenFileSystem : public MemoryFileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override {
    if (path == "c/.index" && saves_left > 0) {
      const std::string text = "metadata " + std::to_string(saves_left--);
      put("c/.metadata", text);
      put("c/.index", index_of(text));
    }
    return MemoryFileSystem::open(path, mode, caching);
  }
  int saves_left = 2;
};

TEST(OpenCheckpointTest, ASaveThatCommitsMeanwhileIsNoDamage) {
  OvertakenFileSystem fs;
  fs.put("c/.metadata", "old");
  fs.put("c/.index", index_of("old"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  ASSERT_NE(opened.index, nullptr);
  EXPECT_EQ(opened.index->metadata, Seal::of(opened.metadata));
}

TEST(OpenCheckpointTest, WithoutMetadataThereIsNoCheckpoint) {
  MemoryFileSystem fs;
  fs.put("c/.index", index_of("m"));
  EXPECT_CODE(open_checkpoint(fs, "c"), StatusCode::kNotFound);
}

TEST(OpenCheckpointTest, RanksHaveNamesOfTheirOwn) {
  MemoryFileSystem fs;
  fs.put("c/__3.metadata", "m");
  fs.put("c/__3.index", index_of("m"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c", {"__3.metadata", "__3.index"}));
  EXPECT_NE(opened.index, nullptr);
}

}  // namespace
}  // namespace torch_ckpt
