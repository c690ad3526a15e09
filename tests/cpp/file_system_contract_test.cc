// What every FileSystem must do. A new one joins by a line in kFileSystems. Its traits say which of
// these it cannot do.
//
// Saves and loads rely on this and on the contract of IoQueue (io_queue_test.cc).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/file_system.h"
#include "io/posix_file_system.h"
#include "support/memory_file_system.h"
#include "support/memory_object_store.h"
#include "support/read_file.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"

namespace torch_ckpt::file_system_contract_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kBlock = 4096;

struct Candidate {
  std::string name;
  std::function<std::unique_ptr<FileSystem>()> make;
};

const std::vector<Candidate> kFileSystems = {
    {"Posix", [] { return std::make_unique<PosixFileSystem>(); }},
    {"Memory", [] { return std::make_unique<MemoryFileSystem>(); }},
    {"Store", [] { return std::make_unique<MemoryStoreFileSystem>(); }},
};

class FileSystemContractTest : public testing::TestWithParam<Candidate> {
 protected:
  FileSystem& fs() { return *fs_; }
  bool writes_at_offsets() const { return fs_->traits().writes_at_offsets; }
  std::string directory() const { return directory_.path(); }
  std::string path(const std::string& name) const { return directory_.file(name); }

 private:
  std::unique_ptr<FileSystem> fs_ = GetParam().make();
  TempDirectory directory_;
};

std::string candidate_name(const testing::TestParamInfo<Candidate>& candidate) {
  return candidate.param.name;
}

INSTANTIATE_TEST_SUITE_P(FileSystems, FileSystemContractTest, testing::ValuesIn(kFileSystems),
                         candidate_name);

TEST_P(FileSystemContractTest, AnEmptyFileIsAFile) {
  ASSERT_OK(write_file(fs(), path("a"), {}, false));
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs(), path("a")));
  EXPECT_TRUE(bytes.empty());
}

// "No checkpoint there" is told from a failed disk by its code.
TEST_P(FileSystemContractTest, AMissingFileIsNotFound) {
  EXPECT_CODE(read_file(fs(), path("a")), StatusCode::kNotFound);
  EXPECT_CODE(fs().open(path("a"), OpenMode::kRead, Caching::kDirect), StatusCode::kNotFound);
  const Status removed = fs().remove(path("a"));  // A store does not say whether there was one.
  if (!fs().traits().publishes_by_condition || !removed.ok()) {
    EXPECT_CODE(removed, StatusCode::kNotFound);
  }
  EXPECT_CODE(fs().rename(path("a"), path("b")), StatusCode::kNotFound);
  EXPECT_THAT(read_file(fs(), path("a")).status().message(), HasSubstr(path("a")));
}

// Committed bytes are never written over: a name that is taken is an error.
TEST_P(FileSystemContractTest, CreatingAnExistingFileFailsAndLeavesItAlone) {
  ASSERT_OK(write_file(fs(), path("a"), as_bytes("old"), false));
  const Status status = write_file(fs(), path("a"), as_bytes("new"), false);
  EXPECT_EQ(status.code(), StatusCode::kStorage);
  EXPECT_EQ(status.error_number(), EEXIST);
  if (writes_at_offsets()) {  // A stream may replace a file.
    const auto direct = fs().open(path("a"), OpenMode::kCreate, Caching::kDirect);
    EXPECT_EQ(direct.status().error_number(), EEXIST);
  }
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs(), path("a")));
  EXPECT_EQ(as_text(bytes), "old");
}

TEST_P(FileSystemContractTest, AStreamRefusesWhatItCannotDo) {
  if (writes_at_offsets()) GTEST_SKIP() << "writes at offsets";
  ASSERT_OK(write_file(fs(), path("a"), as_bytes("old"), false));
  const auto shared = fs().open(path("a"), OpenMode::kUpdate, Caching::kBuffered);
  EXPECT_CODE(shared, StatusCode::kUnsupported);
  EXPECT_THAT(shared.status().message(), HasSubstr(path("a")));
  ASSERT_OK_AND_ASSIGN(const auto file, fs().open(path("b"), OpenMode::kCreate, Caching::kDirect));
  EXPECT_CODE(file->truncate(1), StatusCode::kStorage);
  std::byte byte;
  EXPECT_CODE(file->read(0, {&byte, 1}), StatusCode::kStorage);
}

// A stream appears with kSync. A writer that fails before leaves nothing.
TEST_P(FileSystemContractTest, AnAbandonedStreamIsNoFile) {
  if (writes_at_offsets()) GTEST_SKIP() << "writes at offsets";
  {
    ASSERT_OK_AND_ASSIGN(const auto file,
                         fs().open(path("a"), OpenMode::kCreate, Caching::kDirect));
    ASSERT_OK(file->preallocate(5));
    ASSERT_OK(file->write(0, as_bytes("01234")));
    EXPECT_CODE(read_file(fs(), path("a")), StatusCode::kNotFound);
    file->abandon();
    EXPECT_CODE(file->write(5, as_bytes("56789")), StatusCode::kCancelled);
  }
  EXPECT_CODE(read_file(fs(), path("a")), StatusCode::kNotFound);
}

TEST_P(FileSystemContractTest, AFileIsPublishedIfItsVersionIsStillTheSame) {
  if (!fs().traits().publishes_by_condition) GTEST_SKIP() << "publishes by rename";
  ASSERT_OK_AND_ASSIGN(const std::string none, fs().version(path("a")));
  EXPECT_EQ(none, "");
  ASSERT_OK(fs().publish(path("a"), as_bytes("one"), none));
  ASSERT_OK_AND_ASSIGN(const std::string one, fs().version(path("a")));
  EXPECT_EQ(fs().publish(path("a"), as_bytes("other"), none).error_number(), EEXIST);
  ASSERT_OK(fs().publish(path("a"), as_bytes("two"), one));
  EXPECT_EQ(fs().publish(path("a"), as_bytes("three"), one).error_number(), EEXIST);
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs(), path("a")));
  EXPECT_EQ(as_text(bytes), "two");
}

TEST_P(FileSystemContractTest, FoldersAreThereOrAreNames) {
  ASSERT_OK(fs().create_directories(path("folder/of/folders")));
  ASSERT_OK(write_file(fs(), path("folder/of/a"), {}, false));
  ASSERT_OK_AND_ASSIGN(const auto names, fs().list_directory(path("folder")));
  EXPECT_THAT(names, ElementsAre("of"));
  if (fs().traits().has_folders) return;
  ASSERT_OK_AND_ASSIGN(const auto none, fs().list_directory(path("nowhere")));
  EXPECT_THAT(none, ElementsAre());
}

TEST_P(FileSystemContractTest, ASharedFileKeepsWhatOthersHaveWritten) {
  if (!writes_at_offsets()) GTEST_SKIP() << "a store of streams";
  EXPECT_CODE(fs().open(path("a"), OpenMode::kUpdate, Caching::kBuffered), StatusCode::kNotFound);
  ASSERT_OK(write_file(fs(), path("a"), {}, false));
  for (const Caching caching : {Caching::kDirect, Caching::kBuffered}) {
    ASSERT_OK_AND_ASSIGN(const auto one, fs().open(path("a"), OpenMode::kUpdate, caching));
    ASSERT_OK(one->preallocate(10));
    ASSERT_OK_AND_ASSIGN(const auto other, fs().open(path("a"), OpenMode::kUpdate, caching));
    ASSERT_OK(one->write(0, as_bytes("01234")));
    ASSERT_OK(other->preallocate(10));
    ASSERT_OK(other->write(5, as_bytes("56789")));
    ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs(), path("a")));
    EXPECT_EQ(as_text(bytes), "0123456789");
  }
}

TEST_P(FileSystemContractTest, PreallocateSetsTheLengthUpAndDown) {
  if (!writes_at_offsets()) GTEST_SKIP() << "a store of streams";
  ASSERT_OK_AND_ASSIGN(const auto file, fs().open(path("a"), OpenMode::kCreate, Caching::kDirect));
  for (const int64_t nbytes : {int64_t{0}, 3 * kBlock + 1, kBlock, int64_t{0}}) {
    ASSERT_OK(file->preallocate(nbytes));
    EXPECT_EQ(*file->size(), nbytes);
  }
}

TEST_P(FileSystemContractTest, TruncateSetsTheLength) {
  if (!writes_at_offsets()) GTEST_SKIP() << "a store of streams";
  ASSERT_OK_AND_ASSIGN(const auto file, fs().open(path("a"), OpenMode::kCreate, Caching::kDirect));
  ASSERT_OK(file->truncate(12345));
  EXPECT_EQ(*file->size(), 12345);
  ASSERT_OK_AND_ASSIGN(const auto reader, fs().open(path("a"), OpenMode::kRead, Caching::kDirect));
  EXPECT_CODE(reader->truncate(1), StatusCode::kStorage);
}

TEST_P(FileSystemContractTest, ListsNamesInOrder) {
  for (const char* name : {"b", "a", ".metadata", "B"}) {
    ASSERT_OK(write_file(fs(), path(name), {}, false));
  }
  ASSERT_OK_AND_ASSIGN(const auto names, fs().list_directory(directory()));
  EXPECT_THAT(names, ElementsAre(".metadata", "B", "a", "b"));
}

TEST_P(FileSystemContractTest, RenameReplaces) {
  ASSERT_OK(write_file(fs(), path("a"), as_bytes("new"), false));
  ASSERT_OK(write_file(fs(), path("b"), as_bytes("old"), false));
  ASSERT_OK(fs().rename(path("a"), path("b")));
  ASSERT_OK(fs().sync_directory(directory()));
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs(), path("b")));
  EXPECT_EQ(as_text(bytes), "new");
  EXPECT_CODE(read_file(fs(), path("a")), StatusCode::kNotFound);
}

// A link to a file that is replaced or removed keeps its bytes.
TEST_P(FileSystemContractTest, ALinkIsAFileOfTheSameBytes) {
  for (const bool sync : {false, true}) {
    const std::string from = path(str_cat("from ", sync));
    const std::string to = path(str_cat("to ", sync));
    ASSERT_OK(write_file(fs(), from, as_bytes("bytes"), false));
    ASSERT_OK(fs().link(from, to, sync));
    ASSERT_OK(write_file(fs(), path("other"), as_bytes("others"), false));
    ASSERT_OK(fs().rename(path("other"), from));
    ASSERT_OK_AND_ASSIGN(const auto linked, read_file(fs(), to));
    EXPECT_EQ(as_text(linked), "bytes");
    ASSERT_OK(fs().remove(to));
    ASSERT_OK_AND_ASSIGN(const auto left, read_file(fs(), from));
    EXPECT_EQ(as_text(left), "others");
  }
}

TEST_P(FileSystemContractTest, ALinkToAMissingFileIsNotFound) {
  EXPECT_CODE(fs().link(path("none"), path("a"), false), StatusCode::kNotFound);
  EXPECT_CODE(read_file(fs(), path("a")), StatusCode::kNotFound);
}

TEST_P(FileSystemContractTest, ALinkReplacesNoFileExceptOnAStore) {
  ASSERT_OK(write_file(fs(), path("a"), as_bytes("new"), false));
  ASSERT_OK(write_file(fs(), path("b"), as_bytes("old"), false));
  const Status linked = fs().link(path("a"), path("b"), false);
  const bool replaces = !fs().traits().has_folders;
  EXPECT_EQ(linked.ok(), replaces);
  EXPECT_EQ(linked.error_number(), replaces ? 0 : EEXIST);
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs(), path("b")));
  EXPECT_EQ(as_text(bytes), replaces ? "new" : "old");
}

// Files of 0 bytes, of less than one piece of the copy, and of several.
TEST_P(FileSystemContractTest, ACopyHasTheSameBytes) {
  PosixFileSystem disk;
  for (const int64_t nbytes : {int64_t{0}, int64_t{5000}, (int64_t{17} << 20) + 3}) {
    const std::string name = str_cat("of ", nbytes);
    std::string contents(static_cast<size_t>(nbytes), '\0');
    for (size_t i = 0; i < contents.size(); ++i) contents[i] = static_cast<char>(i * i >> 7);
    ASSERT_OK(write_file(disk, path(name), as_bytes(contents), false));
    ASSERT_OK(copy_file(disk, path(name), fs(), path("in")));
    ASSERT_OK_AND_ASSIGN(const auto inside, read_file(fs(), path("in")));
    EXPECT_EQ(as_text(inside), contents);
    ASSERT_OK(copy_file(fs(), path("in"), disk, path("out")));
    ASSERT_OK_AND_ASSIGN(const auto outside, read_file(disk, path("out")));
    EXPECT_EQ(as_text(outside), contents);
    ASSERT_OK(fs().remove(path("in")));
    ASSERT_OK(disk.remove(path("out")));
  }
  EXPECT_CODE(copy_file(fs(), path("none"), disk, path("out")), StatusCode::kNotFound);
}

TEST_P(FileSystemContractTest, AQueueReadsBackWhatItWrote) {
  ASSERT_OK_AND_ASSIGN(const auto file,
                       fs().open(path("a"), OpenMode::kCreate, Caching::kBuffered));
  const auto queue = fs().make_queue(4);
  std::string written = "some bytes";
  const auto finish = [&](IoRequest::Kind kind, std::string& bytes) {
    const bool ends_stream = kind == IoRequest::Kind::kSync && !writes_at_offsets();
    const IoRequest request = {kind,
                               file.get(),
                               ends_stream ? static_cast<int64_t>(bytes.size()) : 0,
                               {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()},
                               Caching::kBuffered,
                               7};
    queue->submit({&request, 1});
    const IoDone done = queue->wait().front();
    EXPECT_EQ(done.tag, 7u);
    return done.status;
  };
  ASSERT_OK(file->preallocate(static_cast<int64_t>(written.size())));
  ASSERT_OK(finish(IoRequest::Kind::kWrite, written));
  ASSERT_OK(finish(IoRequest::Kind::kSync, written));
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs(), path("a")));
  EXPECT_EQ(as_text(bytes), written);
  EXPECT_EQ(queue->in_flight(), 0);
}

}  // namespace
}  // namespace torch_ckpt::file_system_contract_test
