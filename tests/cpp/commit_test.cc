// Commit is the one step that makes a checkpoint visible.

#include "engine/commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <vector>

#include "io/posix_file_system.h"
#include "support/memory_file_system.h"
#include "support/read_file.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"

namespace torch_ckpt::commit_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

constexpr char kMetadata[] = "step-1/.metadata";
constexpr char kIndex[] = "step-1/.index.id-2";
constexpr char kOldIndex[] = "step-1/.index";
constexpr char kPending[] = "step-1/.metadata.id-2.tmp";

// Requires: `text` outlives the result, as a literal does.
Commit what(std::string_view text, bool sync = true) {
  return {.directory = "step-1",
          .names = {},
          .metadata = as_bytes(text),
          .index = as_bytes(text),
          .save_id = "id-2",
          .sync = sync};
}

// As a save does that has begun.
Status begin(FileSystem& fs, const Commit& commit) {
  return write_file(fs, commit.directory + "/" + commit.names.pending_metadata(commit.save_id), {},
                    /*sync=*/false);
}

Status begin_and_commit(FileSystem& fs, const Commit& what) {
  RETURN_IF_ERROR(begin(fs, what));
  return commit(fs, what);
}

std::vector<Operation::Kind> kinds(const MemoryFileSystem& fs) {
  std::vector<Operation::Kind> kinds;
  for (const Operation& operation : fs.operations()) kinds.push_back(operation.kind);
  return kinds;
}

TEST(CommitTest, PublishesNewMetadataInPlaceOfTheOld) {
  MemoryFileSystem fs;
  Commit old = what("old");
  old.save_id = "id-1";
  ASSERT_OK(begin_and_commit(fs, old));
  EXPECT_EQ(fs.contents(kMetadata), "old");
  ASSERT_OK(begin_and_commit(fs, what("new")));
  EXPECT_EQ(fs.contents(kMetadata), "new");
  EXPECT_EQ(fs.contents(kIndex), "new");
  // A save that commits at the same moment does not replace the index of this one.
  EXPECT_THAT(fs.paths(), ElementsAre("step-1/.index.id-1", kIndex, kMetadata));
}

TEST(CommitTest, PublishesOnARealDisk) {
  TempDirectory directory;
  PosixFileSystem fs;
  for (const std::string text : {"old", "new"}) {
    Commit commit_here = what(text);
    commit_here.directory = directory.path();
    commit_here.save_id = text;
    ASSERT_OK(begin_and_commit(fs, commit_here));
    ASSERT_OK_AND_ASSIGN(const auto found, read_file(fs, directory.file(".metadata")));
    EXPECT_EQ(as_text(found), text);
  }
  EXPECT_THAT(*fs.list_directory(directory.path()),
              ElementsAre(".index.new", ".index.old", ".metadata"));
}

// Bytes must be on the disk before their name is, the index before the metadata, and the new name
// before commit returns.
TEST(CommitTest, SyncsBytesAndEntriesThenRenamesThenSyncsTheFolder) {
  using enum Operation::Kind;
  MemoryFileSystem fs;
  fs.put(kPending, "");
  ASSERT_OK(commit(fs, what("new")));
  EXPECT_THAT(kinds(fs), ElementsAre(kOpen, kWrite, kSync, kOpen, kWrite, kSync, kSyncDirectory,
                                     kSyncDirectory, kRename, kSyncDirectory));
  EXPECT_EQ(fs.operations()[0].path, kIndex);
  EXPECT_EQ(fs.operations()[6].path, "step-1");
  EXPECT_EQ(fs.operations()[7].path, ".");
  EXPECT_EQ(fs.operations()[8].path, "step-1/.metadata.id-2.tmp");
}

TEST(CommitTest, WithoutSyncItStillRenames) {
  using enum Operation::Kind;
  MemoryFileSystem fs;
  fs.put(kPending, "");
  ASSERT_OK(commit(fs, what("new", /*sync=*/false)));
  EXPECT_THAT(kinds(fs), ElementsAre(kOpen, kWrite, kOpen, kWrite, kRename));
}

TEST(CommitTest, AnyFailedOperationLeavesTheOldCheckpointAndNothingElse) {
  for (const bool sync : {true, false}) {
    const int64_t publishing = sync ? 8 : 4;  // The rename of the metadata.
    const int64_t last = sync ? 9 : 4;
    for (int64_t n = 0; n <= last + 1; ++n) {
      SCOPED_TRACE("operation " + std::to_string(n) + " fails");
      MemoryFileSystem fs;
      fs.put(kMetadata, "old");
      fs.put(kOldIndex, "old");
      fs.put(kPending, "");
      fs.fail_operation(n, errno_status(EIO, "cannot go on"));
      const Status status = commit(fs, what("new", sync));
      EXPECT_EQ(fs.clear_fault(), n <= last);
      EXPECT_EQ(status.ok(), n > last);
      EXPECT_EQ(fs.contents(kMetadata), n > publishing ? "new" : "old");
      EXPECT_EQ(fs.contents(kOldIndex), "old");
      if (n > publishing) {  // Whether the new metadata last is open; their index stays.
        EXPECT_EQ(fs.contents(kIndex), "new");
      } else {
        EXPECT_THAT(fs.paths(), ElementsAre(kOldIndex, kMetadata));
      }
    }
  }
}

TEST(CommitTest, DataFilesGoWithACommitThatFailed) {
  const std::string text = "new";
  const std::vector<std::string> data_files = {"a.distcp", "b.distcp"};
  for (const int64_t failing : {0, 8}) {
    MemoryFileSystem fs;
    fs.put("step-1/a.distcp", "a");
    fs.put("step-1/b.distcp", "b");
    fs.put(kMetadata, "old");
    fs.put(kPending, "");
    fs.fail_operation(failing, errno_status(EIO, "cannot go on"));
    Commit commit_both = what(text);
    commit_both.data_files = data_files;
    EXPECT_CODE(commit(fs, commit_both), StatusCode::kStorage);
    EXPECT_THAT(fs.paths(), ElementsAre(kMetadata));
  }
}

TEST(CommitTest, DataFilesThatStayAfterAnErrorKeepThePendingFileByWhichTheyAreCollected) {
  for (int64_t failing = 0; failing <= 8; ++failing) {
    SCOPED_TRACE("operation " + std::to_string(failing) + " fails");
    MemoryFileSystem fs;
    fs.put("step-1/a.distcp", "a");
    fs.put(kMetadata, "old");
    fs.put(kPending, "");
    fs.fail_operation(failing, errno_status(ENOSPC, "no space left"));
    Commit commit_it = what("new");
    commit_it.keeps_files = true;
    EXPECT_CODE(commit(fs, commit_it), StatusCode::kStorage);
    EXPECT_EQ(fs.contents("step-1/a.distcp"), "a");
    EXPECT_EQ(fs.contents(kMetadata), "old");
    EXPECT_THAT(fs.paths(), Contains(kPending));
    fs.clear_fault();
    ASSERT_OK(commit(fs, commit_it));
    EXPECT_EQ(fs.contents(kMetadata), "new");
    EXPECT_EQ(fs.contents(kIndex), "new");
    // Another process commits the same copy.
    EXPECT_CODE(commit(fs, commit_it), StatusCode::kNotFound);
    EXPECT_EQ(fs.contents(kMetadata), "new");
    EXPECT_EQ(fs.contents(kIndex), "new");
  }
}

class KeepsDataFiles : public MemoryFileSystem {
 public:
  Status remove(const std::string& path) override {
    if (!path.ends_with(".distcp")) return MemoryFileSystem::remove(path);
    return errno_status(EIO, "cannot remove a data file");
  }
};

TEST(CommitTest, DataFilesThatCannotBeRemovedKeepThePendingFile) {
  const std::vector<std::string> data_files = {"a.distcp"};
  KeepsDataFiles fs;
  fs.put("step-1/a.distcp", "a");
  fs.put(kPending, "");
  fs.fail_operation(0, errno_status(ENOSPC, "no space left"));
  Commit commit_it = what("new");
  commit_it.data_files = data_files;
  EXPECT_CODE(commit(fs, commit_it), StatusCode::kStorage);
  EXPECT_THAT(fs.paths(), ElementsAre(kPending, "step-1/a.distcp"));
}

class ForeignFolders : public MemoryFileSystem {
 public:
  Status sync_directory(const std::string& path) override {
    if (path == "step-1") return MemoryFileSystem::sync_directory(path);
    return errno_status(error, str_cat("cannot open folder ", path));
  }
  int error = EACCES;
};

TEST(CommitTest, FoldersAboveThatMayNotBeOpenedAreLeftToTheirOwners) {
  ForeignFolders fs;
  EXPECT_OK(begin_and_commit(fs, what("new")));
  fs.error = EIO;
  EXPECT_CODE(begin_and_commit(fs, what("newer")), StatusCode::kStorage);
  EXPECT_EQ(fs.contents(kMetadata), "new");
}

TEST(CommitTest, ANewDirectoryGetsItsNameOnceItIsComplete) {
  using enum Operation::Kind;
  MemoryFileSystem fs;
  fs.put("partial/a.distcp", "a");
  Commit commit_it = what("new");
  commit_it.directory = "partial";
  ASSERT_OK(commit_directory(fs, commit_it, "step-1"));
  EXPECT_THAT(kinds(fs), ElementsAre(kOpen, kWrite, kSync, kOpen, kWrite, kSync, kRename,
                                     kSyncDirectory, kSyncDirectory, kRename, kSyncDirectory));
  EXPECT_THAT(fs.paths(), ElementsAre(kIndex, kMetadata, "step-1/a.distcp"));
}

TEST(CommitTest, ADirectoryThatExistsIsNotReplaced) {
  const std::string text = "new";
  const std::vector<std::string> data_files = {"a.distcp"};
  MemoryFileSystem fs;
  fs.put("partial/a.distcp", "a");
  fs.put("step-1/notes", "of somebody else");
  Commit commit_it = what(text);
  commit_it.directory = "partial";
  commit_it.data_files = data_files;
  EXPECT_EQ(commit_directory(fs, commit_it, "step-1").error_number(), ENOTEMPTY);
  EXPECT_THAT(fs.paths(), ElementsAre("partial/a.distcp", "step-1/notes"));
}

// Some file systems rename files only.
class RefusesDirectories : public MemoryFileSystem {
 public:
  Status rename(const std::string& from, const std::string& to) override {
    if (from != "partial") return MemoryFileSystem::rename(from, to);
    return errno_status(EXDEV, "cannot rename a directory");
  }
};

TEST(CommitTest, DataFilesStayIfTheDirectoryCannotBeRenamed) {
  const std::string text = "new";
  const std::vector<std::string> data_files = {"a.distcp"};
  RefusesDirectories fs;
  fs.put("partial/a.distcp", "a");
  Commit commit_it = what(text);
  commit_it.directory = "partial";
  commit_it.data_files = data_files;
  EXPECT_EQ(commit_directory(fs, commit_it, "step-1").error_number(), EXDEV);
  EXPECT_THAT(fs.paths(), ElementsAre("partial/a.distcp"));
}

// As a file server may that has lost its own answer.
class LyingFileSystem : public MemoryFileSystem {
 public:
  Status rename(const std::string& from, const std::string& to) override {
    RETURN_IF_ERROR(MemoryFileSystem::rename(from, to));
    return errno_status(EIO, "cannot tell that it is renamed");
  }
};

TEST(CommitTest, MetadataThatWereRenamedAfterAllKeepTheirIndexAndData) {
  const std::string text = "new";
  const std::vector<std::string> data_files = {"a.distcp"};
  LyingFileSystem fs;
  fs.put(kMetadata, "old");
  fs.put("step-1/a.distcp", "a");
  fs.put(kPending, "");
  Commit commit_it = what(text);
  commit_it.data_files = data_files;
  EXPECT_CODE(commit(fs, commit_it), StatusCode::kStorage);
  EXPECT_EQ(fs.contents("step-1/a.distcp"), "a");
  EXPECT_EQ(fs.contents(kMetadata), "new");
  EXPECT_EQ(fs.contents(kIndex), "new");
}

// Another save removes the pending metadata before operation `n`.
class LosingFileSystem : public MemoryFileSystem {
 public:
  explicit LosingFileSystem(int64_t n) : n_(n) {}
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override {
    lose();
    return MemoryFileSystem::open(path, mode, caching);
  }
  Status sync_directory(const std::string& path) override {
    lose();
    return MemoryFileSystem::sync_directory(path);
  }
  Status rename(const std::string& from, const std::string& to) override {
    lose();
    return MemoryFileSystem::rename(from, to);
  }

 private:
  void lose() {
    if (n_-- == 0) (void)MemoryFileSystem::remove(kPending);
  }
  int64_t n_;
};

TEST(CommitTest, ATemporaryOfAnotherSaveIsLeftAlone) {
  MemoryFileSystem fs;
  fs.put("step-1/.metadata.id-1.tmp", "of another save");
  ASSERT_OK(begin_and_commit(fs, what("new")));
  EXPECT_EQ(fs.contents("step-1/.metadata.id-1.tmp"), "of another save");
}

// Another save does so before it removes the data files of this one.
TEST(CommitTest, WithoutItsPendingMetadataASaveIsNotCommitted) {
  MemoryFileSystem fs;
  fs.put(kMetadata, "of another save");
  EXPECT_CODE(commit(fs, what("new")), StatusCode::kNotFound);
  EXPECT_EQ(fs.contents(kMetadata), "of another save");
  EXPECT_THAT(fs.paths(), ElementsAre(kMetadata));
  // At any later moment, too.
  for (int64_t n = 0;; ++n) {
    LosingFileSystem losing(n);
    losing.put(kMetadata, "of another save");
    losing.put(kPending, "");
    const Status status = commit(losing, what("new"));
    if (status.ok()) break;
    EXPECT_CODE(status, StatusCode::kNotFound);
    EXPECT_EQ(losing.contents(kMetadata), "of another save");
    ASSERT_LT(n, 20);
  }
}

}  // namespace
}  // namespace torch_ckpt::commit_test
