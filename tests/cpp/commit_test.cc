// Commit is the one step that makes a checkpoint visible.

#include "engine/commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "io/posix_file_system.h"
#include "support/memory_file_system.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"

namespace torch_ckpt {
namespace {

using ::testing::ElementsAre;

constexpr char kMetadata[] = "step-1/.metadata";

Status commit(FileSystem& fs, const std::string& text, bool sync = true) {
  return commit_metadata(fs, "step-1", ".metadata", as_bytes(text), "id-2", sync);
}

std::vector<Operation::Kind> kinds(const MemoryFileSystem& fs) {
  std::vector<Operation::Kind> kinds;
  for (const Operation& operation : fs.operations()) kinds.push_back(operation.kind);
  return kinds;
}

TEST(CommitTest, PublishesNewMetadataInPlaceOfTheOld) {
  MemoryFileSystem fs;
  ASSERT_OK(commit(fs, "old"));
  EXPECT_EQ(fs.contents(kMetadata), "old");
  ASSERT_OK(commit(fs, "new"));
  EXPECT_EQ(fs.contents(kMetadata), "new");
  EXPECT_THAT(fs.paths(), ElementsAre(kMetadata));
}

TEST(CommitTest, PublishesOnARealDisk) {
  TempDirectory directory;
  PosixFileSystem fs;
  for (const std::string text : {"old", "new"}) {
    ASSERT_OK(commit_metadata(fs, directory.path(), ".metadata", as_bytes(text), "id", true));
    ASSERT_OK_AND_ASSIGN(const auto found, read_file(fs, directory.file(".metadata")));
    EXPECT_EQ(as_text(found), text);
  }
  EXPECT_THAT(*fs.list_directory(directory.path()), ElementsAre(".metadata"));
}

// The bytes must be on the disk before their name is, and the name before commit returns.
TEST(CommitTest, SyncsTheBytesThenRenamesThenSyncsTheFolder) {
  using enum Operation::Kind;
  MemoryFileSystem fs;
  ASSERT_OK(commit(fs, "new"));
  EXPECT_THAT(kinds(fs), ElementsAre(kOpen, kWrite, kSync, kRename, kSyncDirectory));
  EXPECT_EQ(fs.operations().back().path, "step-1");
}

TEST(CommitTest, WithoutSyncItStillRenames) {
  using enum Operation::Kind;
  MemoryFileSystem fs;
  ASSERT_OK(commit(fs, "new", /*sync=*/false));
  EXPECT_THAT(kinds(fs), ElementsAre(kOpen, kWrite, kRename));
}

TEST(CommitTest, AnyFailedOperationLeavesTheOldMetadataAndNoTemporary) {
  for (const bool sync : {true, false}) {
    for (int64_t n = 0;; ++n) {
      SCOPED_TRACE("operation " + std::to_string(n) + " fails");
      MemoryFileSystem fs;
      fs.put(kMetadata, "old");
      fs.fail_operation(n, errno_status(EIO, "cannot go on"));
      const Status status = commit(fs, "new", sync);
      const bool syncing_folder = fs.operations().back().kind == Operation::Kind::kSyncDirectory;
      EXPECT_THAT(fs.paths(), ElementsAre(kMetadata));
      if (!fs.clear_fault()) {
        ASSERT_OK(status);
        EXPECT_EQ(n, sync ? 5 : 3);
        break;
      }
      EXPECT_CODE(status, StatusCode::kStorage);
      // Renamed already; whether that lasts is what the failed sync leaves open.
      EXPECT_EQ(fs.contents(kMetadata), syncing_folder ? "new" : "old");
    }
  }
}

TEST(CommitTest, ATemporaryOfAnotherSaveIsLeftAlone) {
  MemoryFileSystem fs;
  fs.put("step-1/.metadata.id-1.tmp", "of another save");
  ASSERT_OK(commit(fs, "new"));
  EXPECT_EQ(fs.contents("step-1/.metadata.id-1.tmp"), "of another save");
}

}  // namespace
}  // namespace torch_ckpt
