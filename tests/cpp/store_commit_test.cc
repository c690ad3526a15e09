// Commit on a store, which publishes by a conditional write.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <vector>

#include "engine/commit.h"
#include "support/memory_object_store.h"
#include "support/status_matchers.h"

namespace torch_ckpt::store_commit_test {
namespace {

using ::testing::ElementsAre;
using Kind = StoreCall::Kind;

constexpr char kMetadata[] = "bucket/step-1/.metadata";
constexpr char kIndex[] = "bucket/step-1/.index.id-2";
constexpr char kPending[] = "bucket/step-1/.metadata.id-2.tmp";
constexpr char kData[] = "bucket/step-1/a.distcp";
constexpr char kOther[] = "bucket/step-1/b.distcp";  // Of the former checkpoint.

const std::vector<std::string> kDataFiles = {"a.distcp"};

// A store with a checkpoint, and another save that has written its data.
class StoreCommitTest : public testing::Test {
 protected:
  StoreCommitTest() {
    fs_.store.set(kMetadata, "old");
    fs_.store.set(kOther, "b");
    fs_.store.set(kPending, "");
    fs_.store.set(kData, "a");
    what_.replaced = *fs_.version(kMetadata);
  }

  size_t calls() const { return fs_.store.calls().size(); }
  void expect_only_the_old() {
    EXPECT_EQ(fs_.store.contents(kMetadata), "old");
    EXPECT_THAT(fs_.store.paths(), ElementsAre(kMetadata, kOther));
  }
  void expect_committed() {
    EXPECT_EQ(fs_.store.contents(kMetadata), "new");
    EXPECT_EQ(fs_.store.contents(kIndex), "new");
    EXPECT_EQ(fs_.store.contents(kData), "a");
  }

  MemoryStoreFileSystem fs_;
  Commit what_ = {.directory = "bucket/step-1",
                  .names = {},
                  .metadata = as_bytes("new"),
                  .index = as_bytes("new"),
                  .save_id = "id-2",
                  .data_files = kDataFiles};
};

TEST_F(StoreCommitTest, WritesTheIndexThenTheMetadataThenRemovesThePendingFile) {
  const size_t before = calls();
  ASSERT_OK(commit(fs_, what_));
  const std::vector<StoreCall> all = fs_.store.calls();
  ASSERT_EQ(all.size(), before + 3);
  EXPECT_EQ(all[before].path, kIndex);
  EXPECT_EQ(all[before + 1].path, kMetadata);
  EXPECT_EQ(all[before + 2].path, kPending);
  EXPECT_EQ(all[before + 2].kind, Kind::kRemove);
  expect_committed();
  EXPECT_THAT(fs_.store.paths(), ElementsAre(kIndex, kMetadata, kData, kOther));
}

TEST_F(StoreCommitTest, ANewCheckpointIsWrittenWhereThereIsNone) {
  ASSERT_OK(fs_.remove(kMetadata));
  what_.replaced = "";
  ASSERT_OK(commit(fs_, what_));
  expect_committed();
}

TEST_F(StoreCommitTest, OfTwoSavesTheSecondIsToldAndLeavesNothing) {
  for (const bool is_new : {false, true}) {
    SCOPED_TRACE(is_new);
    if (is_new) what_.replaced = "";  // There was no checkpoint when this save began.
    fs_.store.set(kMetadata, "old");
    fs_.store.set(kData, "a");
    const Status status = commit(fs_, what_);
    EXPECT_CODE(status, StatusCode::kStorage);
    EXPECT_EQ(status.error_number(), EEXIST);
    expect_only_the_old();
  }
}

TEST_F(StoreCommitTest, AllFilesOfACopyStay) {
  what_.replaced = "of another save";
  what_.data_files = {};
  what_.keeps_files = true;
  EXPECT_EQ(commit(fs_, what_).error_number(), EEXIST);
  EXPECT_THAT(fs_.store.paths(), ElementsAre(kIndex, kMetadata, kPending, kData, kOther));
}

TEST_F(StoreCommitTest, ACheckpointThatIsGoneIsNotReplaced) {
  ASSERT_OK(fs_.remove(kMetadata));
  EXPECT_EQ(commit(fs_, what_).error_number(), EEXIST);
  EXPECT_THAT(fs_.store.paths(), ElementsAre(kOther));
}

// The client repeats the write, whose condition is false by then.
TEST_F(StoreCommitTest, ARepeatedWriteWhoseAnswerWasLostIsTheCommit) {
  fs_.store.fail_call(1, errno_status(EEXIST, "another one was written"), /*is_carried_out=*/true);
  ASSERT_OK(commit(fs_, what_));
  expect_committed();
  EXPECT_EQ(fs_.store.contents(kPending), std::nullopt);
}

TEST_F(StoreCommitTest, AnIndexWhoseAnswerWasLostIsWritten) {
  fs_.store.fail_call(0, errno_status(EEXIST, "another one was written"), /*is_carried_out=*/true);
  ASSERT_OK(commit(fs_, what_));
  expect_committed();
}

// The store does not answer when it is asked whose metadata is there.
TEST_F(StoreCommitTest, FilesStayIfTheLostAnswerCannotBeRecognised) {
  class Unreachable : public MemoryObjectStore {
   public:
    Result<Found> find(const std::string& path, int64_t start_nbytes) override {
      if (start_nbytes > 0) return errno_status(ETIMEDOUT, "the store does not answer");
      return MemoryObjectStore::find(path, start_nbytes);
    }
  };
  auto* store = new Unreachable;
  StoreFileSystem fs{std::unique_ptr<ObjectStore>(store)};
  store->set(kMetadata, "old");
  store->set(kPending, "");
  store->set(kData, "a");
  what_.replaced = *fs.version(kMetadata);
  store->fail_call(1, errno_status(EEXIST, "another one was written"), /*is_carried_out=*/true);
  const Status status = commit(fs, what_);
  EXPECT_CODE(status, StatusCode::kStorage);
  EXPECT_NE(status.error_number(), EEXIST) << "that would say that another save has committed";
  EXPECT_EQ(store->contents(kMetadata), "new");
  EXPECT_THAT(store->paths(), ElementsAre(kIndex, kMetadata, kPending, kData));
}

// Nobody knows whether it was carried out, so a checkpoint may need every file. The pending one
// tells the next save whose they are.
TEST_F(StoreCommitTest, AnUnknownEndOfTheCommitRemovesNoFile) {
  for (const bool is_carried_out : {true, false}) {
    SCOPED_TRACE(is_carried_out);
    fs_.store.set(kMetadata, "old");
    ASSERT_OK(fs_.remove(kIndex));
    what_.replaced = *fs_.version(kMetadata);
    fs_.store.fail_call(1, errno_status(ETIMEDOUT, "the store does not answer"), is_carried_out);
    EXPECT_EQ(commit(fs_, what_).error_number(), ETIMEDOUT);
    EXPECT_EQ(fs_.store.contents(kMetadata), is_carried_out ? "new" : "old");
    EXPECT_THAT(fs_.store.paths(), ElementsAre(kIndex, kMetadata, kPending, kData, kOther));
  }
}

TEST_F(StoreCommitTest, AnIndexThatCannotBeWrittenLeavesTheOldCheckpointAndNothingElse) {
  for (const bool is_carried_out : {true, false}) {
    fs_.store.set(kPending, "");
    fs_.store.set(kData, "a");
    fs_.store.fail_call(0, errno_status(EACCES, "the store refuses"), is_carried_out);
    EXPECT_EQ(commit(fs_, what_).error_number(), EACCES);
    expect_only_the_old();
  }
}

// A new save id for every save: an index that is there is of no other one.
TEST_F(StoreCommitTest, AnIndexThatExistsIsNotReplaced) {
  fs_.store.set(kIndex, "of another save");
  EXPECT_EQ(commit(fs_, what_).error_number(), EEXIST);
  EXPECT_EQ(fs_.store.contents(kMetadata), "old");
}

TEST_F(StoreCommitTest, APendingFileThatCannotBeRemovedDoesNotFailTheCommit) {
  fs_.store.fail_call(2, errno_status(EACCES, "the store refuses"));
  ASSERT_OK(commit(fs_, what_));
  expect_committed();
}

// Both save. The files of the one that is committed are there, whichever it is.
TEST_F(StoreCommitTest, AStoreThatIgnoresConditionsKeepsTheLastCheckpointWhole) {
  fs_.store.ignore_conditions();
  fs_.store.set(kMetadata, "of another save");
  ASSERT_OK(commit(fs_, what_));
  expect_committed();
}

}  // namespace
}  // namespace torch_ckpt::store_commit_test
