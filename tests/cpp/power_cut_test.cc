// The states that PowerCuts finds, against sets derived by hand. In a tree written as text, "a=xy"
// is a file of these bytes, '.' is a zero byte, and "3*n" stands for three equal sectors.

#include "support/power_cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/memory_file_system.h"
#include "support/recording_file_system.h"
#include "support/status_matchers.h"

namespace torch_ckpt::power_cut_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr int64_t kSector = 512;

std::string sectors(int64_t count, char byte) {
  return std::string(static_cast<size_t>(count * kSector), byte);
}

std::string shortened(const std::string& bytes) {
  std::string text;
  for (size_t begin = 0; begin < bytes.size();) {
    const char byte = bytes[begin];
    const size_t end = std::min(bytes.find_first_not_of(byte, begin), bytes.size());
    const size_t whole = (end - begin) / kSector;
    if (whole > 0) text += std::to_string(whole) + "*";
    text.append(whole > 0 ? 1 : end - begin, byte == '\0' ? '.' : byte);
    begin = whole > 0 ? begin + whole * kSector : end;
  }
  return text;
}

std::string text_of(const DiskTree& tree) {
  std::string text;
  for (const auto& [path, bytes] : tree) {
    text += (text.empty() ? "" : " ") + path + "=" + shortened(*bytes);
  }
  return text;
}

// A disk in memory, what it holds at first, and its journal.
class PowerCutTest : public testing::Test {
 protected:
  void begin_with(const std::map<std::string, std::string>& files) {
    for (const auto& [path, bytes] : files) disk_.put(path, bytes);
    fs_.emplace(disk_, disk_.tree());
  }
  FileSystem& fs() {
    if (!fs_) begin_with({});
    return *fs_;
  }

  void create(const std::string& path, const std::string& bytes, bool sync) {
    ASSERT_OK(write_file(fs(), path, as_bytes(bytes), sync));
  }
  void sync_folder() { ASSERT_OK(fs().sync_directory(".")); }

  // The tests write to files that are there, which the interface has only for new ones: the file is
  // created, filled and made durable under its name.
  std::unique_ptr<File> durable_file(const std::string& path, const std::string& bytes) {
    auto file = fs().open(path, OpenMode::kCreate, Caching::kBuffered);
    EXPECT_OK(file);
    EXPECT_OK(write(**file, 0, bytes));
    EXPECT_OK(sync(**file));
    sync_folder();
    return std::move(*file);
  }
  Status write(File& file, int64_t offset, std::string bytes) {
    return carry_out(IoRequest::Kind::kWrite, file, offset, std::move(bytes));
  }
  Status sync(File& file) { return carry_out(IoRequest::Kind::kSync, file, 0, ""); }

  // As text; at the last instant unless told otherwise.
  std::vector<std::string> states(int64_t instant = -1, const PowerCutOptions& options = {}) {
    const DiskJournal journal = fs_->journal();
    PowerCuts cuts(journal, options);
    const PowerCutTrees found = cuts.trees_after(instant < 0 ? journal.last_instant() : instant);
    exhaustive_ = found.exhaustive;
    std::vector<std::string> texts;
    for (const DiskTree& tree : found.trees) texts.push_back(text_of(tree));
    return texts;
  }
  int64_t now() { return fs_->journal().last_instant(); }

  MemoryFileSystem disk_;
  std::optional<RecordingFileSystem> fs_;
  bool exhaustive_ = false;

 private:
  Status carry_out(IoRequest::Kind kind, File& file, int64_t offset, std::string bytes) {
    const MutableBytes memory(reinterpret_cast<std::byte*>(bytes.data()), bytes.size());
    const IoRequest request = {.kind = kind,
                               .file = &file,
                               .offset = offset,
                               .memory = memory,
                               .caching = Caching::kBuffered};
    const auto queue = fs().make_queue(1);
    queue->submit({&request, 1});
    return queue->wait()[0].status;
  }
};

TEST_F(PowerCutTest, ANewFileThatWasNotSyncedMayBeAnything) {
  create("a", "xy", /*sync=*/false);
  EXPECT_THAT(states(), UnorderedElementsAre("", "a=", "a=..", "a=xy"));
  EXPECT_TRUE(exhaustive_);
  EXPECT_THAT(states(/*instant=*/1), UnorderedElementsAre("", "a=", "a=..", "a=xy")) << "in flight";
}

TEST_F(PowerCutTest, SyncingAFileKeepsItsBytesAndSyncingItsFolderItsName) {
  create("a", "xy", /*sync=*/true);
  EXPECT_THAT(states(), UnorderedElementsAre("", "a=xy"));
  create("b", "xy", /*sync=*/false);
  sync_folder();
  EXPECT_THAT(states(), UnorderedElementsAre("a=xy b=", "a=xy b=..", "a=xy b=xy"));
}

TEST_F(PowerCutTest, ARenamingIsDoneOrNot) {
  begin_with({{"a", "new"}, {"b", "old"}});
  ASSERT_OK(fs().rename("a", "b"));
  EXPECT_THAT(states(), UnorderedElementsAre("a=new b=old", "b=new"));
  sync_folder();
  EXPECT_THAT(states(), ElementsAre("b=new"));
}

TEST_F(PowerCutTest, ARenamedFolderTakesItsFilesAlong) {
  ASSERT_OK(fs().create_directories("f"));
  create("f/a", "xy", /*sync=*/true);
  ASSERT_OK(fs().sync_directory("f"));
  ASSERT_OK(fs().rename("f", "g"));
  EXPECT_THAT(states(), UnorderedElementsAre("f/a=xy", "g/a=xy"));
  sync_folder();
  EXPECT_THAT(states(), ElementsAre("g/a=xy"));
}

// The mistake of a commit that renames a folder whose names are not durable.
TEST_F(PowerCutTest, ARenamedFolderThatWasNotSyncedMayBeEmpty) {
  ASSERT_OK(fs().create_directories("f"));
  create("f/a", "xy", /*sync=*/true);
  ASSERT_OK(fs().rename("f", "g"));
  EXPECT_THAT(states(), UnorderedElementsAre("", "f/a=xy", "g/a=xy"));
}

TEST_F(PowerCutTest, OfTwoRenamingsOntoOneNameEitherMayLast) {
  begin_with({{"x", "1"}, {"y", "2"}, {"z", "0"}});
  ASSERT_OK(fs().rename("x", "z"));
  ASSERT_OK(fs().rename("y", "z"));
  EXPECT_THAT(states(), UnorderedElementsAre("x=1 y=2 z=0", "y=2 z=1", "x=1 z=2", "z=2"));
}

// The classic mistake: the name is there before the bytes are.
TEST_F(PowerCutTest, RenamingAFileThatWasNotSyncedMayPublishAnEmptyOrTornOne) {
  begin_with({{"b", "old"}});
  create("tmp", sectors(2, 'n'), /*sync=*/false);
  ASSERT_OK(fs().rename("tmp", "b"));
  sync_folder();
  EXPECT_THAT(states(), UnorderedElementsAre("b=", "b=2*.", "b=1*n1*.", "b=2*n"));
}

TEST_F(PowerCutTest, RenamingASyncedTemporaryPublishesAllOrNothing) {
  begin_with({{"b", "old"}});
  create("tmp", sectors(2, 'n'), /*sync=*/true);
  ASSERT_OK(fs().rename("tmp", "b"));
  EXPECT_THAT(states(), UnorderedElementsAre("b=old", "b=old tmp=2*n", "b=2*n"));
}

TEST_F(PowerCutTest, RemovalsAreDoneOrNotIndependently) {
  begin_with({{"a", "1"}, {"b", "2"}});
  ASSERT_OK(fs().remove("a"));
  ASSERT_OK(fs().remove("b"));
  EXPECT_THAT(states(), UnorderedElementsAre("a=1 b=2", "a=1", "b=2", ""));
}

TEST_F(PowerCutTest, ALinkIsDoneOrNotUntilItsFolderIsSynced) {
  begin_with({{"a", "xy"}});
  ASSERT_OK(fs().link("a", "b", /*sync=*/false));
  EXPECT_THAT(states(), UnorderedElementsAre("a=xy", "a=xy b=xy"));
  ASSERT_OK(fs().remove("a"));
  EXPECT_THAT(states(), UnorderedElementsAre("a=xy", "a=xy b=xy", "b=xy", ""));
  sync_folder();
  EXPECT_THAT(states(), ElementsAre("b=xy"));
}

// Both names show the same bytes, whatever these are.
TEST_F(PowerCutTest, ALinkToAFileThatWasNotSyncedMakesItDurableIfItSyncs) {
  create("a", "xy", /*sync=*/false);
  ASSERT_OK(fs().link("a", "b", /*sync=*/false));
  sync_folder();
  EXPECT_THAT(states(), UnorderedElementsAre("a= b=", "a=.. b=..", "a=xy b=xy"));
  ASSERT_OK(fs().link("b", "c", /*sync=*/true));
  EXPECT_THAT(states(), UnorderedElementsAre("a=xy b=xy", "a=xy b=xy c=xy"));
  PowerCuts cuts(fs_->journal());
  EXPECT_EQ(text_of(cuts.tree_after_kill(now())), "a=xy b=xy c=xy");
}

TEST_F(PowerCutTest, OverwritingInPlaceTearsAtSectors) {
  const auto file = durable_file("a", sectors(2, 'o'));
  ASSERT_OK(write(*file, 0, sectors(2, 'n')));
  EXPECT_THAT(states(), UnorderedElementsAre("a=2*o", "a=2*n", "a=2*.", "a=1*n1*o", "a=1*n1*."));
}

TEST_F(PowerCutTest, WritesLastInAnyCombination) {
  const auto file = durable_file("a", "ab");
  ASSERT_OK(write(*file, 0, "x"));
  ASSERT_OK(write(*file, 1, "y"));
  EXPECT_THAT(states(), UnorderedElementsAre("a=ab", "a=xb", "a=.b", "a=ay", "a=xy", "a=.y", "a=a.",
                                             "a=x.", "a=.."));
}

// "..": the file has grown and the bytes are lost. "ax": the bytes are there, the growth is lost.
TEST_F(PowerCutTest, GrowthAndBytesLastIndependently) {
  const auto file = durable_file("a", "ab");
  ASSERT_OK(write(*file, 1, "xyz"));
  EXPECT_THAT(states(), UnorderedElementsAre("a=ab", "a=ax", "a=a.", "a=ab..", "a=axyz", "a=a..."));
}

TEST_F(PowerCutTest, ChangesOfSizeAreDoneOrNot) {
  const auto file = durable_file("a", "abc");
  ASSERT_OK(file->truncate(1));
  EXPECT_THAT(states(), UnorderedElementsAre("a=abc", "a=a"));
  ASSERT_OK(sync(*file));
  EXPECT_THAT(states(), ElementsAre("a=a"));
  ASSERT_OK(file->preallocate(3));
  EXPECT_THAT(states(), UnorderedElementsAre("a=a", "a=a.."));
}

TEST_F(PowerCutTest, ASyncCoversWhatWasReportedBeforeItWasSubmitted) {
  const auto file = durable_file("a", "ab");
  const int64_t before = now();
  std::string bytes = "x";
  const MutableBytes memory(reinterpret_cast<std::byte*>(bytes.data()), bytes.size());
  const auto queue = fs().make_queue(2);
  const IoRequest write = {.kind = IoRequest::Kind::kWrite,
                           .file = file.get(),
                           .memory = memory,
                           .caching = Caching::kBuffered};
  queue->submit({&write, 1});
  ASSERT_OK(sync(*file));
  const int64_t synced = now();
  while (queue->in_flight() > 0) ASSERT_OK(queue->wait()[0].status);
  for (const int64_t instant : {before, synced, now()}) {
    EXPECT_THAT(states(instant), UnorderedElementsAre("a=ab", "a=xb", "a=.b")) << instant;
  }
  EXPECT_THAT(states(before - 1), Contains("a=ab"));
  EXPECT_THAT(states(before - 1), Not(Contains("a=xb")));
}

// The kernel reports a lost write once; see AFailedSyncIsNeverTriedAgain.
TEST_F(PowerCutTest, ASyncAfterAFailedOneCoversOnlyWhatCameBetween) {
  const auto file = durable_file("a", "ab");
  ASSERT_OK(write(*file, 0, "x"));
  disk_.fail_operation(0, errno_status(EIO, "cannot sync"));
  EXPECT_CODE(sync(*file), StatusCode::kStorage);
  ASSERT_OK(write(*file, 1, "y"));
  ASSERT_OK(sync(*file));
  EXPECT_THAT(states(), UnorderedElementsAre("a=ay", "a=xy", "a=.y"));
}

TEST_F(PowerCutTest, AFailedWriteMayHaveDoneAnythingForGood) {
  const auto file = durable_file("a", "ab");
  disk_.fail_operation(0, errno_status(EIO, "cannot write"));
  EXPECT_CODE(write(*file, 0, "x"), StatusCode::kStorage);
  ASSERT_OK(sync(*file));
  EXPECT_THAT(states(), UnorderedElementsAre("a=ab", "a=xb", "a=.b"));
}

TEST_F(PowerCutTest, AFolderThatIsLostTakesItsFilesAlong) {
  ASSERT_OK(fs().create_directories("d/e"));
  create("d/e/a", "xy", /*sync=*/true);
  ASSERT_OK(fs().sync_directory("d/e"));
  EXPECT_THAT(states(), ElementsAre("d/e/a=xy"));
  DiskJournal journal = fs_->journal();
  std::erase_if(journal.changes, [](const DiskChange& change) {
    return change.kind == DiskChange::Kind::kSyncDirectory && change.path == "d";
  });
  const PowerCutTrees found = PowerCuts(journal).trees_after(journal.last_instant());
  std::vector<std::string> texts;
  for (const DiskTree& tree : found.trees) texts.push_back(text_of(tree));
  EXPECT_THAT(texts, UnorderedElementsAre("", "d/e/a=xy"));
}

// 3^12 combinations.
TEST_F(PowerCutTest, SamplesOfManyStatesHoldTheExtremesAndEverySingleDeviation) {
  const auto file = durable_file("a", "abcdefghijkl");
  for (int64_t i = 0; i < 12; ++i) ASSERT_OK(write(*file, i, "X"));
  const std::vector<std::string> found = states(-1, {.limit = 100, .samples = 50});
  EXPECT_FALSE(exhaustive_);
  EXPECT_GT(found.size(), 60u);
  for (const std::string extreme : {"abcdefghijkl", "XXXXXXXXXXXX"}) {
    EXPECT_THAT(found, Contains("a=" + extreme));
    for (size_t i = 0; i < extreme.size(); ++i) {
      for (const char byte : {"abcdefghijkl"[i], 'X', '.'}) {
        std::string deviation = extreme;
        deviation[i] = byte;
        EXPECT_THAT(found, Contains("a=" + deviation));
      }
    }
  }
}

TEST_F(PowerCutTest, AKillLeavesExactlyWhatWasDone) {
  begin_with({{"b", "old"}});
  create("tmp", "new", /*sync=*/false);
  ASSERT_OK(fs().rename("tmp", "b"));
  PowerCuts cuts(fs_->journal());
  std::vector<std::string> texts;
  for (int64_t k = 0; k <= now(); ++k) texts.push_back(text_of(cuts.tree_after_kill(k)));
  EXPECT_THAT(texts, ElementsAre("b=old", "b=old tmp=", "b=old tmp=new", "b=new"));
}

TEST_F(PowerCutTest, AKilledProcessDoesNothingMore) {
  disk_.put("a", "old");
  disk_.kill_at(2);
  const auto status = write_file(disk_, "b", as_bytes("new"), /*sync=*/true);
  EXPECT_CODE(status, StatusCode::kCancelled);
  EXPECT_CODE(disk_.remove("b"), StatusCode::kCancelled);
  EXPECT_CODE(disk_.rename("b", "a"), StatusCode::kCancelled);
  EXPECT_TRUE(disk_.was_killed());
  EXPECT_EQ(text_of(disk_.tree()), "a=old b=new");
}

}  // namespace
}  // namespace torch_ckpt::power_cut_test
