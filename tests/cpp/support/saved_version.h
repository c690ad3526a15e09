#pragma once

// A small checkpoint of two ranks, in versions that only their bytes tell apart: saved the way
// torch_ckpt/storage/writer.py does it, and recognised in whatever tree a crash has left. For crash
// tests.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/commit.h"
#include "engine/load/load_job.h"
#include "engine/open_checkpoint.h"
#include "engine/save/save_job.h"
#include "format/index_file.h"
#include "support/disk_journal.h"
#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt {

inline constexpr char kDirectory[] = "run/step-1";
inline constexpr char kMetadata[] = ".metadata";
inline constexpr int64_t kVersionSumBlock = 4096;  // Small enough for several in a file.

inline std::string path_of(const std::string& name) { return std::string(kDirectory) + "/" + name; }

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

  // Seeds of different versions are 100 apart.
  Version(std::string id, uint32_t seed) : save_id(std::move(id)) {
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

  std::string long_save_id() const {
    return save_id + std::string(static_cast<size_t>(kSaveIdNbytes - std::ssize(save_id)), '.');
  }

  // The index of these metadata. `sums` are those of the data files.
  std::string index(const std::vector<BlockSums>& sums) const {
    Index index;
    index.save_id = long_save_id();
    index.metadata = FileDigest::of(as_bytes(metadata()));
    index.has_entries = true;
    for (size_t r = 0; r < ranks.size(); ++r) {
      index.files.push_back({ranks[r].file, sums[r]});
      const Layout layout = layout_of(ranks[r].tensors);
      for (size_t i = 0; i < ranks[r].tensors.size(); ++i) {
        index.entries.push_back(
            entry_of(ranks[r].tensors[i].live, layout.slices[i], static_cast<int64_t>(r)));
      }
    }
    return std::string(as_text(written(index)));
  }

  // All that a directory holds that holds this version alone.
  std::vector<std::string> paths() const {
    std::vector<std::string> paths = {path_of(kMetadata),
                                      path_of(CommitNames().index_of(long_save_id()))};
    for (const Rank& rank : ranks) paths.push_back(path_of(rank.file));
    return paths;
  }
};

// Both ranks at the same time. A rank that fails removes its file. Returns the sums of the files.
inline Result<std::vector<BlockSums>> write_data(FileSystem& fs, const Version& version,
                                                 const std::string& directory = kDirectory) {
  const auto path_of = [&](const std::string& name) { return directory + "/" + name; };
  std::vector<std::unique_ptr<SaveJob>> jobs;
  for (const Rank& rank : version.ranks) {
    ASSIGN_OR_RETURN(auto job, SaveJob::start(fs, path_of(rank.file), layout_of(rank.tensors),
                                              *rank.pool, {.sum_block_nbytes = kVersionSumBlock}));
    jobs.push_back(std::move(job));
  }
  for (size_t i = 0; i < version.ranks[0].tensors.size(); ++i) {
    for (size_t r = 0; r < jobs.size(); ++r) {
      RETURN_IF_ERROR(jobs[r]->write(static_cast<int64_t>(i), version.ranks[r].tensors[i].live));
    }
  }
  std::vector<BlockSums> sums;
  for (size_t r = 0; r < jobs.size(); ++r) {
    RETURN_IF_ERROR(jobs[r]->finish());
    sums.push_back(jobs[r]->sums());
    const Status status = fs.sync_directory(directory);
    if (!status.ok()) {
      (void)fs.remove(path_of(version.ranks[r].file));
      return status;
    }
  }
  return sums;
}

// A whole save, step by step as torch_ckpt/storage/writer.py has it.
inline Status save_version(FileSystem& fs, const Version& version) {
  RETURN_IF_ERROR(fs.create_directories(kDirectory));
  ASSIGN_OR_RETURN(const std::vector<std::string> found, fs.list_directory(kDirectory));
  const std::string pending = path_of(CommitNames().pending_metadata(version.long_save_id()));
  RETURN_IF_ERROR(write_file(fs, pending, {}, /*sync=*/false));
  const auto sums_or = write_data(fs, version);
  if (!sums_or.ok()) {
    (void)fs.remove(pending);
    return sums_or.status();
  }
  const std::vector<BlockSums>& sums = *sums_or;
  const std::string metadata = metadata_with_trailer(version.metadata(), version.long_save_id());
  const std::string index = version.index(sums);
  RETURN_IF_ERROR(commit(fs, {.directory = kDirectory,
                              .names = {},
                              .metadata = as_bytes(metadata),
                              .index = as_bytes(index),
                              .save_id = version.long_save_id()}));
  // Best effort: a file that stays is not referred to by any metadata.
  for (const std::string& name : found) {
    if (name != kMetadata) (void)fs.remove(path_of(name));
  }
  return ok_status();
}

inline constexpr char kPartial[] = "run/.step-1.partial";

// A whole save of a new directory, step by step as well.
inline Status save_new_version(FileSystem& fs, const Version& version) {
  RETURN_IF_ERROR(fs.create_directories(kPartial));
  const auto sums = write_data(fs, version, kPartial);
  RETURN_IF_ERROR(sums.status());
  const std::string metadata = metadata_with_trailer(version.metadata(), version.long_save_id());
  const std::string index = version.index(*sums);
  const std::vector<std::string> files = {version.ranks[0].file, version.ranks[1].file};
  return commit_directory(fs,
                          {.directory = kPartial,
                           .names = {},
                           .metadata = as_bytes(metadata),
                           .index = as_bytes(index),
                           .save_id = version.long_save_id(),
                           .data_files = files},
                          kDirectory);
}

// ---- What is found.

// What a directory holds: the save id of one of `versions`, whole and exact; "nothing"; or a text
// that says what is broken.
inline std::string load_version(const DiskTree& tree, const std::vector<const Version*>& versions) {
  MemoryFileSystem fs;
  fs.put(tree);
  const auto opened = open_checkpoint(fs, kDirectory);
  if (opened.status().code() == StatusCode::kNotFound) return "nothing";
  if (!opened.ok()) return opened.status().to_string();
  const auto pickle = opened->metadata->read_pickle();
  if (!pickle.ok()) return pickle.status().to_string();
  std::istringstream text{std::string(as_text(*pickle))};
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

  if (opened->index == nullptr) return "metadata that have lost their index";
  const auto job = LoadJob::make(
      fs, kDirectory, {.buffer_nbytes = 96 << 10, .block_nbytes = 16 << 10, .threads = 1},
      opened->index);
  if (!job.ok()) return job.status().to_string();
  const auto result = (*job)->run(requests, {});
  if (!result.ok()) return result.status().to_string();
  for (const TestTensor& tensor : loaded) found += tensor.packed();
  return found == expected ? save_id : "tensors of another version than " + save_id;
}

// Loads from each tree once: a tree is known by its indexes and the files that its metadata name.
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
        if (name.starts_with(CommitNames().index) ||
            metadata->second->find(name) != std::string::npos) {
          read.emplace(path, bytes);
        }
      }
    }
    const auto [known, is_new] = verdicts_.try_emplace(std::move(read));
    if (is_new) known->second = load_version(tree, versions_);
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

}  // namespace torch_ckpt
