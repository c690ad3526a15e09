// What a store does beyond the contract of file systems (file_system_contract_test.cc).

#include "io/store_file_system.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/read_stream.h"
#include "support/deadline.h"
#include "support/memory_file_system.h"
#include "support/memory_object_store.h"
#include "support/read_file.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::store_file_system_test {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using Kind = StoreCall::Kind;

constexpr char kPath[] = "bucket/a";
constexpr int64_t kMiB = int64_t{1} << 20;

TEST(StoreFileSystemTest, ASmallFileIsOpenedAndReadInOneRequest) {
  MemoryStoreFileSystem fs;
  fs.store.set(kPath, "metadata");
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs, kPath));
  EXPECT_EQ(as_text(bytes), "metadata");
  EXPECT_EQ(fs.store.calls().size(), 1u);
}

TEST(StoreFileSystemTest, AFolderIsNoFile) {
  MemoryStoreFileSystem fs;
  fs.store.set("bucket/folder/a", "a");
  EXPECT_EQ(read_file(fs, "bucket/folder").status().error_number(), EISDIR);
  EXPECT_EQ(fs.rename("bucket/folder", "bucket/other").error_number(), EOPNOTSUPP);
  ASSERT_OK_AND_ASSIGN(const auto names, fs.list_directory("bucket"));
  EXPECT_THAT(names, ElementsAre("folder"));
  ASSERT_OK_AND_ASSIGN(const auto none, fs.list_directory("bucket/empty"));
  EXPECT_TRUE(none.empty());
}

TEST(StoreFileSystemTest, ARenameThatFailsLosesNoFile) {
  for (int64_t n = 0; n < 2; ++n) {
    for (const bool is_carried_out : {false, true}) {
      MemoryStoreFileSystem fs;
      fs.store.set("bucket/from", "a");
      fs.store.fail_call(n, errno_status(ETIMEDOUT, "no answer"), is_carried_out);
      EXPECT_EQ(fs.rename("bucket/from", "bucket/to").error_number(), ETIMEDOUT);
      EXPECT_TRUE(fs.store.contents("bucket/from") == "a" || fs.store.contents("bucket/to") == "a");
    }
  }
}

TEST(StoreFileSystemTest, ALinkIsACopyWithinAStoreThatCanCopy) {
  MemoryStoreFileSystem fs;
  fs.store.set(kPath, "a");
  ASSERT_OK(fs.link(kPath, "bucket/b", /*sync=*/true));
  EXPECT_THAT(fs.store.calls(), ElementsAre(Field(&StoreCall::kind, Kind::kCopy)));
  EXPECT_EQ(fs.store.contents("bucket/b"), "a");
  fs.store.fail_call(0, errno_status(ETIMEDOUT, "no answer"));
  EXPECT_EQ(fs.link(kPath, "bucket/c", true).error_number(), ETIMEDOUT);

  // Its `copy` may rename, so that the base would lose the file.
  class NoCopies : public MemoryObjectStore {
   public:
    bool copies() const override { return false; }
  };
  auto store = std::make_unique<NoCopies>();
  NoCopies& no_copies = *store;
  no_copies.set(kPath, "a");
  StoreFileSystem other(std::move(store));
  EXPECT_CODE(other.link(kPath, "bucket/b", true), StatusCode::kUnsupported);
  EXPECT_TRUE(no_copies.calls().empty());
}

TEST(StoreFileSystemTest, VersionsTellFilesApart) {
  MemoryStoreFileSystem fs;
  ASSERT_OK_AND_ASSIGN(const std::string none, fs.version(kPath));
  EXPECT_EQ(none, "");
  ASSERT_OK(fs.publish(kPath, as_bytes("one"), none));
  ASSERT_OK_AND_ASSIGN(const std::string one, fs.version(kPath));
  ASSERT_OK(fs.publish(kPath, as_bytes("two"), one));
  EXPECT_EQ(fs.publish(kPath, as_bytes("three"), one).error_number(), EEXIST);
  EXPECT_EQ(fs.publish(kPath, as_bytes("three"), none).error_number(), EEXIST);
  EXPECT_EQ(fs.store.contents(kPath), "two");
  fs.store.fail_call(0, errno_status(EACCES, "the store refuses"));
  EXPECT_EQ(fs.version(kPath).status().error_number(), EACCES);
  // Some stores answer so where there is none to replace.
  ASSERT_OK(fs.remove(kPath));
  fs.store.fail_call(0, errno_status(ENOENT, "there is none"));
  EXPECT_EQ(fs.publish(kPath, as_bytes("three"), one).error_number(), EEXIST);
}

// As a client repeats a request whose answer was lost.
TEST(StoreFileSystemTest, AFileWithTheSameBytesIsTheOneThatWasWritten) {
  MemoryStoreFileSystem fs;
  ASSERT_OK(fs.put(kPath, as_bytes("ours"), OpenMode::kCreate));
  EXPECT_OK(fs.put(kPath, as_bytes("ours"), OpenMode::kCreate));
  for (const std::string other : {"our", "ours and more", "theirs", ""}) {
    EXPECT_EQ(fs.put(kPath, as_bytes(other), OpenMode::kCreate).error_number(), EEXIST) << other;
  }
  EXPECT_OK(fs.put(kPath, as_bytes("theirs"), OpenMode::kUpdate));
}

// EEXIST says that another one was written. Whether it was, is unknown.
TEST(StoreFileSystemTest, AFileThatCannotBeComparedIsNotSaidToBeOfOthers) {
  MemoryStoreFileSystem fs;
  fs.store.set(kPath, "theirs");
  fs.store.fail_call(1, errno_status(ETIMEDOUT, "no answer"));
  const Status status = fs.put(kPath, as_bytes("ours"), OpenMode::kCreate);
  EXPECT_EQ(status.error_number(), ETIMEDOUT);
  EXPECT_THAT(status.message(), HasSubstr(kPath));
}

TEST(StoreFileSystemTest, AStreamTakesOneWriteAtATimeFromOneThread) {
  const Deadline deadline;
  MemoryStoreFileSystem fs;
  const std::vector<std::byte> bytes = random_bytes(20 * kMiB, 1);
  ASSERT_OK_AND_ASSIGN(const auto file, fs.open(kPath, OpenMode::kCreate, Caching::kDirect));
  ASSERT_OK(file->preallocate(ssize(bytes)));
  for (int64_t at = 0; at < ssize(bytes); at += kMiB) {
    ASSERT_OK(file->write(at, slice(Bytes(bytes), at, kMiB)));
  }
  const auto queue = fs.make_queue(1);
  const IoRequest sync = {
      .kind = IoRequest::Kind::kSync, .file = file.get(), .offset = ssize(bytes)};
  queue->submit({&sync, 1});
  ASSERT_OK(queue->wait().front().status);
  EXPECT_TRUE(fs.store.contents(kPath) == as_text(bytes));
}

// The client retains its answer until the bytes are in the tensors, so they are not copied before.
TEST(StoreFileSystemTest, AReadStreamConsumesTheMemoryOfTheClient) {
  class Answers : public MemoryObjectStore {
   public:
    Result<Window> get(const std::string& path, int64_t offset, int64_t nbytes) override {
      auto window = MemoryObjectStore::get(path, offset, nbytes);
      const std::lock_guard lock(mutex_);
      if (window.ok()) made.emplace_back(window->bytes, window->lease);
      return window;
    }
    std::vector<std::pair<Bytes, std::weak_ptr<void>>> made;

   private:
    std::mutex mutex_;
  };
  auto made = std::make_unique<Answers>();
  Answers& store = *made;
  StoreFileSystem fs(std::move(made));
  const std::vector<std::byte> bytes = random_bytes(32 * kMiB, 1);
  store.set(kPath, as_text(bytes));
  const auto file = std::move(*fs.open(kPath, OpenMode::kRead, Caching::kDirect));
  const auto stream = std::move(*ReadStream::make(fs, 16 * kMiB, 4 * kMiB, 2));
  std::vector<WantedRange> wanted;
  for (int64_t at = 0; at < ssize(bytes); at += kMiB) {
    wanted.push_back({.file = file.get(), .range = {at, at + kMiB}});
  }
  std::mutex mutex;
  std::vector<Bytes> consumed;
  ASSERT_OK(stream->run(wanted, [&](int64_t index, Bytes got, Unpacking&) {
    EXPECT_TRUE(std::ranges::equal(got, slice(Bytes(bytes), index * kMiB, kMiB)));
    const std::lock_guard lock(mutex);
    consumed.push_back(got);
    return ok_status();
  }));
  EXPECT_EQ(store.made.size(), 8u);
  for (const Bytes got : consumed) {
    EXPECT_TRUE(std::ranges::any_of(store.made, [&](const auto& answer) {
      const Bytes whole = answer.first;
      return got.data() >= whole.data() && got.data() < whole.data() + whole.size();
    }));
  }
  for (const auto& [whole, lease] : store.made) EXPECT_TRUE(lease.expired());
}

// A lack of memory ends a run while requests are in flight, which pass their answers to it.
TEST(StoreFileSystemTest, AReadStreamThatFailsReleasesTheAnswersInFlight) {
  class LateAnswers : public MemoryObjectStore {
   public:
    Result<Window> get(const std::string& path, int64_t offset, int64_t nbytes) override {
      if (offset > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      auto window = MemoryObjectStore::get(path, offset, nbytes);
      const std::lock_guard lock(mutex_);
      if (window.ok()) leases.push_back(window->lease);
      return window;
    }
    std::vector<std::weak_ptr<void>> leases;

   private:
    std::mutex mutex_;
  };
  auto made = std::make_unique<LateAnswers>();
  LateAnswers& store = *made;
  StoreFileSystem fs(std::move(made));
  store.set(kPath, as_text(random_bytes(4 * kMiB, 1)));
  const auto file = std::move(*fs.open(kPath, OpenMode::kRead, Caching::kDirect));
  const auto stream = std::move(*ReadStream::make(fs, 4 * kMiB, kMiB, 1));
  std::vector<WantedRange> wanted;
  for (int64_t at = 0; at < 4 * kMiB; at += kMiB) {
    wanted.push_back({.file = file.get(), .range = {at, at + kMiB}});
  }
  const Status status = stream->run(wanted, [](int64_t, Bytes, Unpacking&) -> Status {
    throw std::runtime_error("out of something");
  });
  EXPECT_CODE(status, StatusCode::kInternal);
  EXPECT_EQ(store.leases.size(), 4u);
  for (const auto& lease : store.leases) EXPECT_TRUE(lease.expired());
}

// Reads across a gap that costs less than a request.
TEST(StoreFileSystemTest, AReadStreamJoinsRangesByTheGapOfItsFileSystem) {
  const std::vector<std::byte> bytes = random_bytes(4 * kMiB, 1);
  const auto requests = [&](FileSystem& fs, const std::string& path, int64_t gap) {
    const auto file = std::move(*fs.open(path, OpenMode::kRead, Caching::kDirect));
    const auto stream = std::move(*ReadStream::make(fs, 16 * kMiB, 4 * kMiB, 1));
    const int64_t next = kMiB + gap;
    const std::vector<WantedRange> wanted = {{.file = file.get(), .range = {0, kMiB}},
                                             {.file = file.get(), .range = {next, next + 4096}}};
    EXPECT_OK(stream->run(wanted, [&](int64_t index, Bytes got, Unpacking&) {
      const ByteRange& range = wanted[static_cast<size_t>(index)].range;
      EXPECT_TRUE(std::ranges::equal(got, slice(Bytes(bytes), range.begin, range.nbytes())));
      return ok_status();
    }));
  };
  MemoryStoreFileSystem fs;
  fs.store.set(kPath, as_text(bytes));
  requests(fs, kPath, fs.traits().max_gap_nbytes);
  EXPECT_EQ(fs.store.count(Kind::kGet), 1);
  requests(fs, kPath, fs.traits().max_gap_nbytes + 4096);
  EXPECT_EQ(fs.store.count(Kind::kGet), 3);
  MemoryFileSystem disk;
  disk.put(kPath, as_text(bytes));
  requests(disk, kPath, disk.traits().max_gap_nbytes);
  EXPECT_EQ(disk.count(Operation::Kind::kRead), 1);
  requests(disk, kPath, kMiB);
  EXPECT_EQ(disk.count(Operation::Kind::kRead), 3);
}

}  // namespace
}  // namespace torch_ckpt::store_file_system_test
