// Which index belongs to which metadata, in whatever state saves have left the directory.

#include "engine/open_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/status_matchers.h"

namespace torch_ckpt::open_checkpoint_test {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr char kId[] = "0123456789abcdef";
constexpr char kIndex[] = "c/.index.0123456789abcdef";
constexpr char kOldIndex[] = "c/.index";  // Its name before version 0.3.0.

std::string index_of(const std::string& metadata, const std::string& save_id = kId,
                     const std::string& data_file = "") {
  Index index;
  if (!data_file.empty()) index.files.push_back({.name = data_file});
  index.save_id = save_id;
  index.metadata = FileDigest::of(as_bytes(metadata));
  return std::string(as_text(written(index)));
}

std::string metadata_of(const std::string& pickle, const std::string& save_id = kId) {
  return metadata_with_trailer(pickle, save_id);
}

TEST(OpenCheckpointTest, TakesTheIndexThatWasCommittedWithTheMetadataAndNoOther) {
  const struct {
    const char* what;
    std::string metadata;
    std::string index;
    bool is_taken;
  } cases[] = {
      {"committed with it", metadata_of("m"), index_of("m"), true},
      {"of the same pickle in another save", metadata_of("m"), index_of("m", "ffffffffffffffff"),
       false},
      {"of metadata without a trailer", "m", index_of("m"), false},
      {"of other metadata", "m", index_of("ours"), false},
  };
  for (const auto& [what, metadata, index, is_taken] : cases) {
    for (const char* name : {kIndex, kOldIndex}) {
      SCOPED_TRACE(std::string(what) + ", " + name);
      MemoryFileSystem fs;
      fs.put("c/.metadata", metadata);
      fs.put(name, index);
      ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
      EXPECT_EQ(as_text(*opened.metadata->read_pickle()), "m");
      EXPECT_EQ(opened.index != nullptr, is_taken);
      if (is_taken) {
        EXPECT_OK(opened.index_status);
        EXPECT_EQ(opened.index->save_id(), kId);
      } else {
        EXPECT_CODE(opened.index_status, StatusCode::kCorruption);
        EXPECT_THAT(opened.index_status.message(), HasSubstr("belongs to another save"));
      }
    }
  }
}

TEST(OpenCheckpointTest, LeavesTheIndexesOfOtherSavesAlone) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", metadata_of("new"));
  fs.put(kOldIndex, index_of("old"));
  fs.put("c/.index.00000000aaaaaaaa", "torn");
  fs.put("c/.index.00000000bbbbbbbb", index_of("of a save that failed"));
  fs.put(kIndex, index_of("new"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  ASSERT_NE(opened.index, nullptr);
  EXPECT_EQ(opened.index->metadata(), FileDigest::of(as_bytes("new")));
}

// Otherwise metadata whose trailer is damaged would be metadata that never had an index.
TEST(OpenCheckpointTest, WithoutATrailerFindsWhatEveryReadableIndexNames) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", "m");
  fs.put("c/.index.00000000aaaaaaaa", "torn");
  fs.put("c/.index.00000000bbbbbbbb", index_of("b", kId, "b.distcp"));
  fs.put(kIndex, index_of("m", kId, "a.distcp"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_EQ(opened.index, nullptr);
  EXPECT_THAT(opened.indexed_files, UnorderedElementsAre("a.distcp", "b.distcp"));
}

TEST(OpenCheckpointTest, AnIndexThatIsMissingIsReportedWithItsName) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", metadata_of("m"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_CODE(opened.index_status, StatusCode::kNotFound);
  EXPECT_THAT(opened.index_status.message(), HasSubstr(kIndex));
}

// However long they are.
TEST(OpenCheckpointTest, ReadsTheEndOfTheMetadataAndTheStartOfTheIndex) {
  MemoryFileSystem fs;
  const std::string pickle(5 << 20, 'p');
  Index index{.save_id = kId, .metadata = FileDigest::of(as_bytes(pickle))};
  IndexedFile file{.name = "a"};
  file.sums.file_nbytes = kSumBlockNbytes << 20;
  file.sums.sums.resize(1 << 20);
  index.files = {file};
  fs.put("c/.metadata", metadata_of(pickle));
  fs.put(kIndex, as_text(written(index)));
  ASSERT_GT(fs.contents(kIndex)->size(), size_t{8} << 20);
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  ASSERT_NE(opened.index, nullptr);
  int64_t read_nbytes = 0;
  for (const Operation& operation : fs.operations()) read_nbytes += operation.nbytes;
  EXPECT_EQ(read_nbytes, kMetadataTrailerNbytes + (64 << 10));
  EXPECT_EQ(fs.count(Operation::Kind::kRead), 2);
}

// What is open stays what it was.
TEST(OpenCheckpointTest, ASaveOverWhatIsOpenChangesNothing) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", metadata_of("old"));
  fs.put(kIndex, index_of("old"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  fs.put("c/.metadata", metadata_of("new"));
  fs.put(kIndex, index_of("new"));
  ASSERT_NE(opened.index, nullptr);
  EXPECT_OK(opened.index->check());
  EXPECT_EQ(as_text(*opened.metadata->read_pickle()), "old");
}

TEST(OpenCheckpointTest, ADamagedIndexIsReportedWithItsName) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", metadata_of("m"));
  std::string damaged = index_of("m");
  damaged[30] ^= 1;
  fs.put(kIndex, damaged);
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_EQ(opened.index, nullptr);
  EXPECT_CODE(opened.index_status, StatusCode::kCorruption);
  EXPECT_THAT(opened.index_status.message(), HasSubstr(kIndex));
}

// A hole costs a disk nothing, and memory as much as it claims.
TEST(OpenCheckpointTest, AnIndexOfAnotherLengthThanItsHeaderStatesIsNotRead) {
  MemoryFileSystem fs;
  fs.put("c/.metadata", metadata_of("m"));
  fs.put(kIndex, index_of("m") + std::string(1 << 20, '\0'));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  EXPECT_CODE(opened.index_status, StatusCode::kCorruption);
  for (const Operation& operation : fs.operations()) EXPECT_LE(operation.nbytes, 64 << 10);
}

// Commits another checkpoint at the moment when the index of the first is asked for.
class OvertakenFileSystem : public MemoryFileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override {
    if (path == kIndex && saves_left > 0) {
      const std::string text = "metadata " + std::to_string(saves_left--);
      put("c/.metadata", metadata_of(text));
      put(kIndex, index_of(text));
    }
    return MemoryFileSystem::open(path, mode, caching);
  }
  int saves_left = 2;
};

TEST(OpenCheckpointTest, ASaveThatCommitsMeanwhileIsNoDamage) {
  OvertakenFileSystem fs;
  fs.put("c/.metadata", metadata_of("old"));
  fs.put(kIndex, index_of("old"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c"));
  ASSERT_NE(opened.index, nullptr);
  EXPECT_EQ(opened.index->metadata(), FileDigest::of(*opened.metadata->read_pickle()));
}

// Removes the checkpoint after its metadata have been opened, as the retention of a run does.
class RemovingFileSystem : public MemoryFileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override {
    if (path == kIndex) {
      (void)remove("c/.metadata");
      (void)remove(kIndex);
    }
    return MemoryFileSystem::open(path, mode, caching);
  }
};

TEST(OpenCheckpointTest, ACheckpointThatIsRemovedMeanwhileIsNotFound) {
  RemovingFileSystem fs;
  fs.put("c/.metadata", metadata_of("m"));
  fs.put(kIndex, index_of("m"));
  EXPECT_CODE(open_checkpoint(fs, "c"), StatusCode::kNotFound);
}

TEST(OpenCheckpointTest, WithoutMetadataThereIsNoCheckpoint) {
  MemoryFileSystem fs;
  fs.put(kIndex, index_of("m"));
  EXPECT_CODE(open_checkpoint(fs, "c"), StatusCode::kNotFound);
}

TEST(OpenCheckpointTest, RanksHaveNamesOfTheirOwn) {
  MemoryFileSystem fs;
  fs.put("c/__3.metadata", metadata_of("m"));
  fs.put("c/__3.index.0123456789abcdef", index_of("m"));
  ASSERT_OK_AND_ASSIGN(const auto opened, open_checkpoint(fs, "c", {"__3.metadata", "__3.index"}));
  EXPECT_NE(opened.index, nullptr);
}

}  // namespace
}  // namespace torch_ckpt::open_checkpoint_test
