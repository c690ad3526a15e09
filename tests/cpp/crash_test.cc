// Crashes: whatever happens to a save at whatever moment, the directory holds exactly the old
// checkpoint or exactly the new one. power_cut.h states what a power cut may do to the disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/memory_file_system.h"
#include "support/power_cut.h"
#include "support/recording_file_system.h"
#include "support/saved_version.h"
#include "support/status_matchers.h"

namespace torch_ckpt::crash_test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

std::string listing(const DiskTree& tree) {
  std::string text;
  for (const auto& [path, bytes] : tree) text += str_cat("  ", path, ": ", bytes->size(), " B\n");
  return text;
}

// What led to an instant, for the message of a failure.
std::string history(const DiskJournal& journal, int64_t instant) {
  std::string text = str_cat("instant ", instant, " of ", journal.last_instant(), "\n");
  for (int64_t i = std::max<int64_t>(0, instant - 5); i < instant; ++i) {
    text += "  " + to_string(journal.changes[static_cast<size_t>(i)]) + "\n";
  }
  return text;
}

// Saves into a disk that holds `initial`, and returns all that happened.
DiskJournal journal_of_save(const DiskTree& initial, const Version& version, uint32_t seed = 1) {
  MemoryFileSystem disk({.seed = seed});
  disk.put(initial);
  RecordingFileSystem fs(disk, initial);
  EXPECT_OK(save_version(fs, version));
  EXPECT_THAT(disk.paths(), UnorderedElementsAreArray(version.paths()));
  return fs.journal();
}

// What every legal tree of the instants from `first` on holds.
void expect_found(const DiskJournal& journal, int64_t first, const std::set<std::string>& allowed,
                  const PowerCutOptions& options, Judge& judge) {
  PowerCuts cuts(journal, options);
  for (int64_t instant = first; instant <= journal.last_instant(); ++instant) {
    std::vector<DiskTree> trees = cuts.trees_after(instant).trees;
    trees.push_back(cuts.tree_after_kill(instant));
    for (const DiskTree& tree : trees) {
      const std::string verdict = judge(tree);
      ASSERT_TRUE(allowed.contains(verdict)) << verdict << "\nseed " << options.seed << ", "
                                             << history(journal, instant) << listing(tree);
    }
  }
}

PowerCutOptions thorough(uint32_t seed) { return {.limit = 4000, .samples = 400, .seed = seed}; }
constexpr PowerCutOptions kBrief = {.limit = 100, .samples = 20};

class CrashTest : public testing::Test {
 protected:
  CrashTest() {
    MemoryFileSystem fs;
    EXPECT_OK(save_version(fs, old_));
    old_tree_ = fs.tree();
  }

  bool survives_failure(int64_t n, int error, Judge& judge);

  const Version old_{"old0", 100};
  const Version new_{"new1", 200};
  const Version next_{"next2", 300};
  DiskTree old_tree_;
};

// Fails operation `n` of an overwrite and checks what is left; false when there is no such
// operation.
bool CrashTest::survives_failure(int64_t n, int error, Judge& judge) {
  MemoryFileSystem disk;
  disk.put(old_tree_);
  RecordingFileSystem fs(disk, old_tree_);
  disk.fail_operation(n, errno_status(error, "cannot go on"));
  const Status status = save_version(fs, new_);
  const bool has_failed = disk.clear_fault();
  const std::vector<Operation> operations = disk.operations();
  const auto renamed = std::ranges::find(operations, Operation::Kind::kRename, &Operation::kind);
  const bool is_committed = renamed - operations.begin() < n;

  EXPECT_EQ(load_version(disk.tree(), {&old_, &new_}), is_committed ? new_.save_id : old_.save_id);
  std::set<std::string> allowed = {old_.save_id};
  if (is_committed) allowed.insert(new_.save_id);
  if (status.ok()) allowed = {new_.save_id};
  const DiskJournal journal = fs.journal();
  expect_found(journal, journal.last_instant(), allowed, thorough(1), judge);

  // Only cleaning up may fail unnoticed.
  if (!status.ok()) {
    EXPECT_TRUE(has_failed);
    EXPECT_CODE(status, StatusCode::kStorage);
    EXPECT_EQ(status.error_number(), error);
  } else if (has_failed) {
    const Operation& failed = operations[static_cast<size_t>(n)];
    EXPECT_EQ(failed.kind, Operation::Kind::kRemove) << failed.path;
  }
  EXPECT_OK(save_version(fs, next_));
  EXPECT_THAT(disk.paths(), UnorderedElementsAreArray(next_.paths()));
  EXPECT_EQ(load_version(disk.tree(), {&next_}), next_.save_id);
  return has_failed;
}

constexpr uint32_t kSeeds[] = {1, 2, 3, 4, 5};

TEST_F(CrashTest, PowerCutDuringAnOverwriteLeavesOldOrNew) {
  Judge judge({&old_, &new_});
  for (const uint32_t seed : kSeeds) {
    const DiskJournal journal = journal_of_save(old_tree_, new_, seed);
    expect_found(journal, 0, {"old0", "new1"}, thorough(seed), judge);
  }
  judge.report("power cuts during an overwrite");
}

TEST_F(CrashTest, PowerCutDuringAFirstSaveLeavesNothingOrNew) {
  Judge judge({&new_});
  for (const uint32_t seed : kSeeds) {
    const DiskJournal journal = journal_of_save({}, new_, seed);
    expect_found(journal, 0, {"nothing", "new1"}, thorough(seed), judge);
  }
  judge.report("power cuts during a first save");
}

TEST_F(CrashTest, PowerCutAfterTheSaveReturnedLeavesNew) {
  Judge judge({&old_, &new_});
  for (const uint32_t seed : kSeeds) {
    for (const DiskTree& initial : {old_tree_, DiskTree()}) {
      const DiskJournal journal = journal_of_save(initial, new_, seed);
      expect_found(journal, journal.last_instant(), {"new1"}, thorough(seed), judge);
    }
  }
  judge.report("power cuts after the save");
}

// As a script does that calls makedirs before it saves.
TEST_F(CrashTest, PowerCutAfterASaveIntoAFolderJustMadeLeavesNew) {
  Judge judge({&new_});
  MemoryFileSystem disk;
  RecordingFileSystem fs(disk, {}, kDirectory);
  ASSERT_OK(save_version(fs, new_));
  const DiskJournal journal = fs.journal();
  expect_found(journal, 0, {"nothing", "new1"}, thorough(1), judge);
  expect_found(journal, journal.last_instant(), {"new1"}, thorough(1), judge);
  judge.report("power cuts during a save into a folder just made");
}

TEST_F(CrashTest, PowerCutDuringASaveOfANewDirectoryLeavesNothingOrNew) {
  Judge judge({&new_});
  for (const uint32_t seed : kSeeds) {
    MemoryFileSystem disk({.seed = seed});
    RecordingFileSystem fs(disk, {}, "run");
    ASSERT_OK(save_new_version(fs, new_));
    EXPECT_THAT(disk.paths(), UnorderedElementsAreArray(new_.paths()));
    const DiskJournal journal = fs.journal();
    expect_found(journal, 0, {"nothing", "new1"}, thorough(seed), judge);
    expect_found(journal, journal.last_instant(), {"new1"}, thorough(seed), judge);
    // Under its name, there is never a directory without a checkpoint.
    PowerCuts cuts(journal, kBrief);
    for (int64_t instant = 0; instant <= journal.last_instant(); ++instant) {
      const DiskTree tree = cuts.tree_after_kill(instant);
      const auto first = tree.lower_bound(std::string(kDirectory) + "/");
      const bool exists = first != tree.end() && first->first.starts_with(kDirectory);
      EXPECT_EQ(judge(tree), exists ? "new1" : "nothing") << history(journal, instant);
    }
  }
  judge.report("power cuts during a save of a new directory");
}

TEST_F(CrashTest, AnOperationThatFailsInASaveOfANewDirectoryLeavesNothingOrNew) {
  for (int64_t n = 0;; ++n) {
    MemoryFileSystem disk;
    disk.fail_operation(n, errno_status(EIO, "cannot go on"));
    const Status status = save_new_version(disk, new_);
    if (!disk.clear_fault()) break;
    EXPECT_CODE(status, StatusCode::kStorage);
    const std::string verdict = load_version(disk.tree(), {&new_});
    const bool is_last = disk.operations().back().kind == Operation::Kind::kSyncDirectory;
    EXPECT_EQ(verdict, disk.count(Operation::Kind::kRename) > 0 && is_last ? "new1" : "nothing");
  }
}

TEST_F(CrashTest, TheJudgeTellsVersionsApart) {
  const std::vector<const Version*> versions = {&old_, &new_};
  EXPECT_EQ(load_version({}, versions), "nothing");
  EXPECT_EQ(load_version(old_tree_, versions), "old0");
  const DiskJournal journal = journal_of_save(old_tree_, new_);
  const DiskTree new_tree = PowerCuts(journal).tree_after_kill(journal.last_instant());
  EXPECT_EQ(load_version(new_tree, versions), "new1");
  // A mix that every checksum holds for.
  DiskTree mixed = new_tree;
  mixed[path_of(new_.ranks[1].file)] = old_tree_[path_of(old_.ranks[1].file)];
  EXPECT_THAT(load_version(mixed, versions), HasSubstr("checksum that the index states"));
  DiskTree torn = new_tree;
  torn[path_of(kMetadata)] = contents_of(new_.metadata().substr(0, 512));
  EXPECT_EQ(load_version(torn, versions), "torn metadata");
}

// The leftovers of a crash neither stand in the way of the next save nor outlive it.
TEST_F(CrashTest, TheNextSaveAfterAPowerCutSucceedsAndLeavesItselfAlone) {
  const DiskJournal journal = journal_of_save(old_tree_, new_);
  PowerCuts cuts(journal, kBrief);
  std::mt19937 random(/*seed=*/1);
  for (int64_t instant = 0; instant <= journal.last_instant(); ++instant) {
    SCOPED_TRACE("seed 1, " + history(journal, instant));
    std::vector<DiskTree> trees = cuts.trees_after(instant).trees;
    std::ranges::shuffle(trees, random);
    trees.resize(std::min<size_t>(trees.size(), 10));
    for (const DiskTree& tree : trees) {
      MemoryFileSystem disk;
      disk.put(tree);
      ASSERT_OK(save_version(disk, next_));
      ASSERT_THAT(disk.paths(), UnorderedElementsAreArray(next_.paths()));
      ASSERT_EQ(load_version(disk.tree(), {&next_}), "next2");
    }
  }
}

TEST_F(CrashTest, KillAtAnyOperationLeavesOldOrNewAndTheNextSaveSucceeds) {
  int64_t killed = 0;
  for (;; ++killed) {
    SCOPED_TRACE("killed at operation " + std::to_string(killed));
    MemoryFileSystem disk;
    disk.put(old_tree_);
    disk.kill_at(killed);
    const Status status = save_version(disk, new_);
    const std::string verdict = load_version(disk.tree(), {&old_, &new_});
    if (!disk.was_killed()) {
      EXPECT_OK(status);
      EXPECT_EQ(verdict, "new1");
      break;
    }
    ASSERT_THAT(verdict, AnyOf("old0", "new1"));
    MemoryFileSystem rebooted;
    rebooted.put(disk.tree());
    ASSERT_OK(save_version(rebooted, next_));
    ASSERT_THAT(rebooted.paths(), UnorderedElementsAreArray(next_.paths()));
    ASSERT_EQ(load_version(rebooted.tree(), {&next_}), "next2");
  }
  EXPECT_GT(killed, 20);  // Death has been everywhere.
  std::cout << "[  STATES  ] kills: " << killed << " states\n";
}

// A failed commit leaves open whether the disk holds the old metadata or the new.
TEST_F(CrashTest, PowerCutDuringTheSaveAfterAFailedOneLeavesOldOrNewOrNext) {
  Judge judge({&old_, &new_, &next_});
  for (int64_t n = 0;; ++n) {
    SCOPED_TRACE(str_cat("operation ", n, " of the first save fails"));
    MemoryFileSystem disk;
    disk.put(old_tree_);
    RecordingFileSystem fs(disk, old_tree_);
    disk.fail_operation(n, errno_status(EIO, "cannot go on"));
    const Status status = save_version(fs, new_);
    if (!disk.clear_fault()) break;
    const int64_t first = fs.journal().last_instant();
    ASSERT_OK(save_version(fs, next_));
    const DiskJournal journal = fs.journal();
    std::set<std::string> allowed = {"new1", "next2"};
    if (!status.ok()) allowed.insert("old0");
    expect_found(journal, first, allowed, kBrief, judge);
    expect_found(journal, journal.last_instant(), {"next2"}, kBrief, judge);
  }
  judge.report("power cuts during the save after a failed one");
}

TEST_F(CrashTest, AnyFailedOperationLeavesOldOrNewAndTheNextSaveSucceeds) {
  Judge judge({&old_, &new_});
  for (const int error : {ENOSPC, EIO, EDQUOT, EFBIG, EINTR}) {
    int64_t n = 0;
    for (bool has_failed = true; has_failed && !HasFailure(); ++n) {
      SCOPED_TRACE(str_cat("operation ", n, " fails with errno ", error));
      has_failed = survives_failure(n, error, judge);
    }
    EXPECT_GT(n, 20);  // The fault has been everywhere.
  }
  judge.report("failed operations, and power cuts after them");
}

}  // namespace
}  // namespace torch_ckpt::crash_test
