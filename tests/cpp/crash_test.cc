// Crashes: whatever happens to a save at whatever moment, the directory holds exactly the old
// checkpoint or exactly the new one. power_cut.h states what a power cut may do to the disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/commit.h"
#include "engine/load_job.h"
#include "engine/save_job.h"
#include "support/memory_file_system.h"
#include "support/power_cut.h"
#include "support/recording_file_system.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt {
namespace {

using ::testing::AnyOf;
using ::testing::UnorderedElementsAreArray;

constexpr char kDirectory[] = "run/step-1";
constexpr char kMetadata[] = ".metadata";

std::string path_of(const std::string& name) { return std::string(kDirectory) + "/" + name; }

// ---- What is saved.

// One rank's share of a checkpoint: one data file.
struct Rank {
  std::string file;
  std::vector<TestTensor> tensors;
  std::unique_ptr<BufferPool> pool = make_pool(16 << 10, 8 << 10);  // Several writes to a file.
};

// A checkpoint of two ranks. All versions have the same names and shapes, so that nothing but
// their bytes tells them apart.
struct Version {
  std::string save_id;
  std::vector<Rank> ranks;

  explicit Version(std::string id) : save_id(std::move(id)) {
    const auto seed = static_cast<uint32_t>(std::hash<std::string>()(save_id) % 1000);
    for (uint32_t r = 0; r < 2; ++r) {
      const std::string rank = std::to_string(r);
      ranks.push_back({"__" + rank + "_0_" + save_id + ".distcp", {}});
      const auto add = [&](const std::string& name, DType dtype, Dims sizes) {
        const auto number = static_cast<uint32_t>(ranks[r].tensors.size());
        ranks[r].tensors.push_back(TestTensor::random("model.layers." + rank + ".attention." + name,
                                                      dtype, std::move(sizes),
                                                      seed + 10 * r + number));
      };
      add("weight", DType::kFloat32, {60, 40 + r});
      add("bias", DType::kBFloat16, {300});
      add("exp_avg", DType::kFloat32, {30, 50});
      add("exp_avg_sq", DType::kFloat32, {20, 50});
      add("step", DType::kInt64, {});
    }
  }

  // Stands for DCP's: which version it is, how many tensors follow, and where each one lies.
  std::string metadata() const {
    std::string lines;
    size_t count = 0;
    for (const Rank& rank : ranks) {
      const Layout layout = layout_of(rank.tensors);
      for (size_t i = 0; i < rank.tensors.size(); ++i, ++count) {
        const Slice& slice = layout.slices[i];
        lines += str_cat(rank.tensors[i].live.name, " ", rank.file, " ", slice.offset, " ",
                         slice.total_nbytes(), "\n");
      }
    }
    return str_cat(save_id, " ", count, "\n", lines);
  }

  // All that a directory holds that holds this version alone.
  std::vector<std::string> paths() const {
    std::vector<std::string> paths = {path_of(kMetadata)};
    for (const Rank& rank : ranks) paths.push_back(path_of(rank.file));
    return paths;
  }
};

// Both ranks at the same time. A rank that fails removes its file.
Status write_data(FileSystem& fs, const Version& version) {
  std::vector<std::unique_ptr<SaveJob>> jobs;
  for (const Rank& rank : version.ranks) {
    ASSIGN_OR_RETURN(auto job, SaveJob::start(fs, path_of(rank.file), layout_of(rank.tensors),
                                              *rank.pool, SaveOptions()));
    jobs.push_back(std::move(job));
  }
  for (size_t i = 0; i < version.ranks[0].tensors.size(); ++i) {
    for (size_t r = 0; r < jobs.size(); ++r) {
      RETURN_IF_ERROR(jobs[r]->write(static_cast<int64_t>(i), version.ranks[r].tensors[i].live));
    }
  }
  for (size_t r = 0; r < jobs.size(); ++r) {
    RETURN_IF_ERROR(jobs[r]->finish());
    const Status status = fs.sync_directory(kDirectory);
    if (!status.ok()) {
      (void)fs.remove(path_of(version.ranks[r].file));
      return status;
    }
  }
  return ok_status();
}

// A whole save, step by step as torch_ckpt/writer.py has it.
Status save(FileSystem& fs, const Version& version) {
  RETURN_IF_ERROR(fs.create_directories(kDirectory));
  ASSIGN_OR_RETURN(const std::vector<std::string> found, fs.list_directory(kDirectory));
  RETURN_IF_ERROR(write_data(fs, version));
  RETURN_IF_ERROR(commit_metadata(fs, kDirectory, kMetadata, as_bytes(version.metadata()),
                                  version.save_id, /*sync=*/true));
  // Best effort: a file that stays is not referred to by any metadata.
  for (const std::string& name : found) {
    if (name != kMetadata) (void)fs.remove(path_of(name));
  }
  return ok_status();
}

// ---- What is found.

// What a directory holds: the save id of one of `versions`, whole and exact; "nothing"; or a text
// that says what is broken.
std::string load(const DiskTree& tree, const std::vector<const Version*>& versions) {
  const auto metadata = tree.find(path_of(kMetadata));
  if (metadata == tree.end()) return "nothing";
  std::istringstream text(*metadata->second);
  std::string save_id;
  size_t count = 0;
  text >> save_id >> count;
  const auto version = std::ranges::find_if(
      versions, [&](const Version* candidate) { return candidate->save_id == save_id; });
  if (version == versions.end()) return "metadata of no save";

  std::vector<TestTensor> loaded;
  std::vector<TensorRequest> requests;
  std::string expected;
  std::string found;
  for (const Rank& rank : (*version)->ranks) {
    for (const TestTensor& tensor : rank.tensors) {
      const LiveTensor& live = tensor.live;
      StoredSlice slice;
      text >> slice.name >> slice.file >> slice.offset >> slice.nbytes;
      if (!text || slice.name != live.name) return "torn metadata";
      loaded.push_back(TestTensor::random(live.name, live.dtype, live.sizes, /*seed=*/12345));
      requests.push_back({slice, {Dims(live.sizes.size(), 0), live.sizes}, loaded.back().live});
      expected += tensor.packed();
    }
  }
  if (requests.size() != count || text.get() != '\n') return "torn metadata";

  MemoryFileSystem fs;
  fs.put(tree);
  const auto job = LoadJob::make(
      fs, kDirectory, {.buffer_nbytes = 96 << 10, .block_nbytes = 16 << 10, .threads = 1});
  if (!job.ok()) return job.status().to_string();
  const auto result = (*job)->run(requests, {});
  if (!result.ok()) return result.status().to_string();
  for (const TestTensor& tensor : loaded) found += tensor.packed();
  return found == expected ? save_id : "tensors of another version than " + save_id;
}

// Loads from each tree once: a tree is known by the files that its metadata names.
class Judge {
 public:
  explicit Judge(std::vector<const Version*> versions) : versions_(std::move(versions)) {}

  std::string operator()(const DiskTree& tree) {
    ++states_;
    DiskTree read;
    const auto metadata = tree.find(path_of(kMetadata));
    if (metadata != tree.end()) {
      read.insert(*metadata);
      for (const auto& [path, bytes] : tree) {
        const std::string name = path.substr(std::string(kDirectory).size() + 1);
        if (metadata->second->find(name) != std::string::npos) read.emplace(path, bytes);
      }
    }
    const auto [known, is_new] = verdicts_.try_emplace(std::move(read));
    if (is_new) known->second = load(tree, versions_);
    return known->second;
  }

  void report(const std::string& what) const {
    std::cout << "[  STATES  ] " << what << ": " << states_ << " states, " << verdicts_.size()
              << " loads that differ\n";
    testing::Test::RecordProperty("states", std::to_string(states_));
  }

 private:
  const std::vector<const Version*> versions_;
  std::map<DiskTree, std::string> verdicts_;  // Its keys share their bytes: see PowerCuts.
  int64_t states_ = 0;
};

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

// ---- The scenarios.

// Saves into a disk that holds `initial`, and returns all that happened.
DiskJournal journal_of_save(const DiskTree& initial, const Version& version, uint32_t seed = 1) {
  MemoryFileSystem disk({.seed = seed});
  disk.put(initial);
  RecordingFileSystem fs(disk, initial);
  EXPECT_OK(save(fs, version));
  EXPECT_THAT(disk.paths(), UnorderedElementsAreArray(version.paths()));
  return fs.journal();
}

// What every legal tree of the instants from `first` on holds.
void expect_found(const DiskJournal& journal, int64_t first, const std::set<std::string>& allowed,
                  uint32_t seed, Judge& judge) {
  PowerCuts cuts(journal, {.limit = 4000, .samples = 400, .seed = seed});
  for (int64_t instant = first; instant <= journal.last_instant(); ++instant) {
    std::vector<DiskTree> trees = cuts.trees_after(instant).trees;
    trees.push_back(cuts.tree_after_kill(instant));
    for (const DiskTree& tree : trees) {
      const std::string verdict = judge(tree);
      ASSERT_TRUE(allowed.contains(verdict))
          << verdict << "\nseed " << seed << ", " << history(journal, instant) << listing(tree);
    }
  }
}

class CrashTest : public testing::Test {
 protected:
  CrashTest() {
    MemoryFileSystem fs;
    EXPECT_OK(save(fs, old_));
    old_tree_ = fs.tree();
  }

  const Version old_{"old0"};
  const Version new_{"new1"};
  const Version next_{"next2"};
  DiskTree old_tree_;
};

constexpr uint32_t kSeeds[] = {1, 2, 3, 4, 5};

TEST_F(CrashTest, PowerCutDuringAnOverwriteLeavesOldOrNew) {
  Judge judge({&old_, &new_});
  for (const uint32_t seed : kSeeds) {
    const DiskJournal journal = journal_of_save(old_tree_, new_, seed);
    expect_found(journal, 0, {"old0", "new1"}, seed, judge);
  }
  judge.report("power cuts during an overwrite");
}

TEST_F(CrashTest, PowerCutDuringAFirstSaveLeavesNothingOrNew) {
  Judge judge({&new_});
  for (const uint32_t seed : kSeeds) {
    const DiskJournal journal = journal_of_save({}, new_, seed);
    expect_found(journal, 0, {"nothing", "new1"}, seed, judge);
  }
  judge.report("power cuts during a first save");
}

TEST_F(CrashTest, PowerCutAfterTheSaveReturnedLeavesNew) {
  Judge judge({&old_, &new_});
  for (const uint32_t seed : kSeeds) {
    for (const DiskTree& initial : {old_tree_, DiskTree()}) {
      const DiskJournal journal = journal_of_save(initial, new_, seed);
      expect_found(journal, journal.last_instant(), {"new1"}, seed, judge);
    }
  }
  judge.report("power cuts after the save");
}

TEST_F(CrashTest, TheJudgeTellsVersionsApart) {
  const std::vector<const Version*> versions = {&old_, &new_};
  EXPECT_EQ(load({}, versions), "nothing");
  EXPECT_EQ(load(old_tree_, versions), "old0");
  const DiskJournal journal = journal_of_save(old_tree_, new_);
  const DiskTree new_tree = PowerCuts(journal).tree_after_kill(journal.last_instant());
  EXPECT_EQ(load(new_tree, versions), "new1");
  // A mix that every checksum holds for.
  DiskTree mixed = new_tree;
  mixed[path_of(new_.ranks[1].file)] = old_tree_[path_of(old_.ranks[1].file)];
  EXPECT_EQ(load(mixed, versions), "tensors of another version than new1");
  DiskTree torn = new_tree;
  torn[path_of(kMetadata)] = contents_of(new_.metadata().substr(0, 512));
  EXPECT_EQ(load(torn, versions), "torn metadata");
}

// The leftovers of a crash neither stand in the way of the next save nor outlive it.
TEST_F(CrashTest, TheNextSaveAfterAPowerCutSucceedsAndLeavesItselfAlone) {
  const DiskJournal journal = journal_of_save(old_tree_, new_);
  PowerCuts cuts(journal, {.limit = 20, .samples = 2});
  std::mt19937 random(1);
  for (int64_t instant = 0; instant <= journal.last_instant(); ++instant) {
    SCOPED_TRACE(history(journal, instant));
    std::vector<DiskTree> trees = cuts.trees_after(instant).trees;
    std::ranges::shuffle(trees, random);
    trees.resize(std::min<size_t>(trees.size(), 10));
    for (const DiskTree& tree : trees) {
      MemoryFileSystem disk;
      disk.put(tree);
      ASSERT_OK(save(disk, next_));
      ASSERT_THAT(disk.paths(), UnorderedElementsAreArray(next_.paths()));
      ASSERT_EQ(load(disk.tree(), {&next_}), "next2");
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
    const Status status = save(disk, new_);
    const std::string verdict = load(disk.tree(), {&old_, &new_});
    if (!disk.was_killed()) {
      EXPECT_OK(status);
      EXPECT_EQ(verdict, "new1");
      break;
    }
    ASSERT_THAT(verdict, AnyOf("old0", "new1"));
    MemoryFileSystem rebooted;
    rebooted.put(disk.tree());
    ASSERT_OK(save(rebooted, next_));
    ASSERT_THAT(rebooted.paths(), UnorderedElementsAreArray(next_.paths()));
    ASSERT_EQ(load(rebooted.tree(), {&next_}), "next2");
  }
  EXPECT_GT(killed, 20);  // Death has been everywhere.
  std::cout << "[  STATES  ] kills: " << killed << " states\n";
}

// Fails operation `n` of an overwrite and checks what is left; false when there is no such
// operation.
bool survives_failure(const DiskTree& old_tree, const Version& old_version,
                      const Version& new_version, const Version& next, int64_t n, int error,
                      Judge& judge) {
  MemoryFileSystem disk;
  disk.put(old_tree);
  RecordingFileSystem fs(disk, old_tree);
  disk.fail_operation(n, errno_status(error, "cannot go on"));
  const Status status = save(fs, new_version);
  const bool has_failed = disk.clear_fault();
  const std::vector<Operation> operations = disk.operations();
  const auto renamed = std::ranges::find(operations, Operation::Kind::kRename, &Operation::kind);
  const bool is_committed = renamed - operations.begin() < n;

  EXPECT_EQ(load(disk.tree(), {&old_version, &new_version}),
            is_committed ? new_version.save_id : old_version.save_id);
  std::set<std::string> allowed = {old_version.save_id};
  if (is_committed) allowed.insert(new_version.save_id);
  if (status.ok()) allowed = {new_version.save_id};
  const DiskJournal journal = fs.journal();
  expect_found(journal, journal.last_instant(), allowed, /*seed=*/1, judge);

  // Only cleaning up may fail unnoticed.
  if (!status.ok()) {
    EXPECT_TRUE(has_failed);
    EXPECT_CODE(status, StatusCode::kStorage);
    EXPECT_EQ(status.error_number(), error);
  } else if (has_failed) {
    EXPECT_EQ(operations[static_cast<size_t>(n)].kind, Operation::Kind::kRemove);
  }
  EXPECT_OK(save(fs, next));
  EXPECT_THAT(disk.paths(), UnorderedElementsAreArray(next.paths()));
  EXPECT_EQ(load(disk.tree(), {&next}), next.save_id);
  return has_failed;
}

TEST_F(CrashTest, AnyFailedOperationLeavesOldOrNewAndTheNextSaveSucceeds) {
  Judge judge({&old_, &new_});
  for (const int error : {ENOSPC, EIO, EDQUOT, EFBIG, EINTR}) {
    int64_t n = 0;
    for (bool has_failed = true; has_failed && !HasFailure(); ++n) {
      SCOPED_TRACE(str_cat("operation ", n, " fails with errno ", error));
      has_failed = survives_failure(old_tree_, old_, new_, next_, n, error, judge);
    }
    EXPECT_GT(n, 20);  // The fault has been everywhere.
  }
  judge.report("failed operations, and power cuts after them");
}

}  // namespace
}  // namespace torch_ckpt
