// Uploads to a store in memory: every way in which a client may fail, and no deadlock in any.

#include "io/upload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/deadline.h"
#include "support/memory_object_store.h"
#include "support/status_matchers.h"

namespace torch_ckpt::upload_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kPath[] = "bucket/step-1/a.distcp";
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kPart = 8 * kMiB;

// Bytes without a period that could hide a misplaced window. Made faster than random ones.
std::vector<std::byte> some_bytes(int64_t nbytes) {
  std::vector<std::byte> bytes(static_cast<size_t>(nbytes));
  uint64_t value = 5;
  for (size_t at = 0; at < bytes.size(); at += sizeof(value)) {
    value = value * 6364136223846793005 + 1442695040888963407;
    std::memcpy(&bytes[at], &value, std::min(sizeof(value), bytes.size() - at));
  }
  return bytes;
}

std::vector<StoreCall::Kind> kinds(const MemoryObjectStore& store) {
  std::vector<StoreCall::Kind> kinds;
  for (const StoreCall& call : store.calls()) kinds.push_back(call.kind);
  return kinds;
}

// Writes all windows from so many threads, as a queue does, whose memory is spoilt once it is
// released. Returns the first error.
Status write_windows(Upload& upload, Bytes bytes, int64_t window_nbytes, int threads) {
  std::mutex mutex;
  int64_t next = 0;
  Status first;
  const auto serve = [&] {
    for (;;) {
      int64_t offset = 0;
      {
        const std::lock_guard lock(mutex);
        offset = next;
        next += window_nbytes;
      }
      if (offset >= ssize(bytes)) return;
      const Bytes from = slice(bytes, offset, std::min(window_nbytes, ssize(bytes) - offset));
      std::vector<std::byte> window(from.begin(), from.end());
      const Status status = upload.write(offset, window, threads);
      std::ranges::fill(window, std::byte{0xEE});
      const std::lock_guard lock(mutex);
      if (first.ok()) first = status;
    }
  };
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) all.emplace_back(serve);
  for (std::thread& thread : all) thread.join();
  return first;
}

// Writes all windows, and ends the object meanwhile: the client holds the last ones until then.
Status upload_all(Upload& upload, Bytes bytes, int64_t window_nbytes, int threads) {
  Status finished;
  std::thread finisher([&] { finished = upload.finish(ssize(bytes)); });
  Status status = write_windows(upload, bytes, window_nbytes, threads);
  finisher.join();
  return status.ok() ? finished : status;
}

class UploadTest : public testing::Test {
 protected:
  // Writes and finishes an object, and checks it.
  void expect_uploads(Upload& upload, int64_t nbytes, int64_t window_nbytes, int threads) {
    static const std::vector<std::byte> all = some_bytes(6 * kPart);
    const Bytes bytes = slice(Bytes(all), 0, nbytes);
    ASSERT_OK(upload_all(upload, bytes, window_nbytes, threads));
    EXPECT_TRUE(store_.contents(kPath) == as_text(bytes));
    EXPECT_EQ(store_.held_nbytes(), 0);
  }

  MemoryObjectStore store_;
  Upload upload_{store_, kPath};
  Deadline deadline_;
};

TEST_F(UploadTest, ASmallObjectIsWrittenInOneRequest) {
  for (const int64_t nbytes : {int64_t{0}, int64_t{1}, 3 * kMiB + 5, kPart}) {
    SCOPED_TRACE(nbytes);
    const size_t before = store_.calls().size();
    Upload upload(store_, kPath);
    upload.expect(nbytes);
    expect_uploads(upload, nbytes, kMiB, 3);
    ASSERT_EQ(store_.calls().size(), before + 1);
    EXPECT_EQ(store_.calls().back().kind, StoreCall::Kind::kPut);
  }
}

TEST_F(UploadTest, ALongObjectIsWrittenInParts) {
  using Kind = StoreCall::Kind;
  upload_.expect(2 * kPart + 5);
  expect_uploads(upload_, 2 * kPart + 5, kMiB, 20);
  EXPECT_THAT(kinds(store_),
              ElementsAre(Kind::kStream, Kind::kPart, Kind::kPart, Kind::kPart, Kind::kComplete));
}

TEST_F(UploadTest, WindowsThatArriveInAnyOrderKeepTheirOffsets) {
  constexpr int64_t kWindow = kMiB;
  std::vector<std::byte> bytes = some_bytes(2 * kPart + kWindow / 2);
  upload_.expect(ssize(bytes));
  std::vector<int64_t> offsets;
  for (int64_t at = 0; at < ssize(bytes); at += kWindow) offsets.push_back(at);
  std::ranges::shuffle(offsets, std::mt19937(7));
  std::vector<std::thread> threads;
  for (const int64_t offset : offsets) {
    threads.emplace_back([&, offset] {
      const int64_t nbytes = std::min(kWindow, ssize(bytes) - offset);
      EXPECT_OK(upload_.write(offset, slice(Bytes(bytes), offset, nbytes),
                              static_cast<int>(offsets.size())));
    });
  }
  ASSERT_OK(upload_.finish(ssize(bytes)));  // It waits for all of them.
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(store_.contents(kPath) == as_text(bytes));
}

// Objects that are pickled behind the tensors are in no layout.
TEST_F(UploadTest, AnObjectMayGrowBeyondAPart) {
  for (const int64_t expected : {int64_t{0}, 3 * kMiB, kPart}) {
    Upload upload(store_, kPath);
    upload.expect(expected);
    expect_uploads(upload, 2 * kPart + 3, kMiB, 9);
  }
}

// A client holds a part until it is full. The writer has less memory, and waits for it.
TEST_F(UploadTest, WindowsAreCopiedWhereThoseInFlightMakeNoPart) {
  const struct {
    int64_t expected;
    int64_t window_nbytes;
    int threads;
  } cases[] = {
      {2 * kPart, 256 << 10, 2},
      {2 * kPart, 4 * kMiB, 1},
      {2 * kPart, 3 * kMiB, 2},
      {2 * kPart, kPart + kMiB, 1},
      {2 * kPart, kMiB, 7},
      {2 * kPart, kMiB, 8},
      {2 * kPart, 4 * kMiB, 2},
      {2 * kPart, 3 * kMiB, 3},
      {2 * kPart, 5 * kMiB, 2},
      {int64_t{60} << 30, kMiB, 12},
      {int64_t{60} << 30, 4 * kMiB, 3},
      {0, kMiB, 2},
  };
  for (const auto& [expected, window_nbytes, threads] : cases) {
    SCOPED_TRACE(str_cat(threads, " windows of ", window_nbytes, ", ", expected, " expected"));
    Upload upload(store_, kPath);
    upload.expect(expected);
    expect_uploads(upload, 2 * kPart + 5, window_nbytes, threads);
  }
}

TEST_F(UploadTest, CopiesOfWindowsAreAtMostTwoParts) {
  constexpr int64_t kWindow = 256 << 10;
  store_.stall_transfers();
  upload_.expect(6 * kPart);
  std::thread writer([&] { expect_uploads(upload_, 6 * kPart, kWindow, 2); });
  store_.wait_for_stalled(2);
  store_.resume_transfers();
  writer.join();
  EXPECT_LE(store_.most_held_nbytes(), 2 * kPart + kWindow);
}

// Also one whose answer was lost, although the object is there.
TEST_F(UploadTest, AClientThatFailsFailsTheUpload) {
  constexpr int64_t kNbytes = 3 * kPart + 5;
  const std::vector<std::byte> bytes = some_bytes(kNbytes);
  for (const int threads : {2, 30}) {  // Copied windows, and the writer's own.
    for (const bool is_carried_out : {false, true}) {
      for (int64_t n = 0;; ++n) {
        SCOPED_TRACE(str_cat("call ", n, " of ", threads, " threads"));
        MemoryObjectStore store;
        store.fail_call(n, errno_status(ECONNRESET, "the store is gone"), is_carried_out);
        Status status;
        {
          Upload upload(store, kPath);
          upload.expect(kNbytes);
          status = upload_all(upload, bytes, kMiB, threads);
        }
        EXPECT_EQ(store.held_nbytes(), 0);
        if (!store.clear_fault()) {
          ASSERT_OK(status);
          EXPECT_EQ(n, 6);
          break;
        }
        EXPECT_EQ(status.error_number(), ECONNRESET) << status.to_string();
        if (!is_carried_out) {
          EXPECT_THAT(store.paths(), IsEmpty());
        }
      }
    }
  }
}

TEST_F(UploadTest, ASmallObjectThatCannotBeWrittenIsAnError) {
  store_.fail_call(0, errno_status(EACCES, "the store refuses"));
  ASSERT_OK(upload_.write(0, as_bytes("small"), 2));
  EXPECT_EQ(upload_.finish(5).error_number(), EACCES);
  EXPECT_THAT(store_.paths(), IsEmpty());
}

// A client with a fault of its own.
class OtherClient : public MemoryObjectStore {
 public:
  explicit OtherClient(std::function<Status(Windows&)> stream) : stream_(std::move(stream)) {}
  Status put_stream(const std::string&, int64_t, Windows& windows) override {
    return stream_(windows);
  }

 private:
  const std::function<Status(Windows&)> stream_;
};

Status pull(Windows& windows, int count) {
  for (int i = 0; i < count; ++i) RETURN_IF_ERROR(windows.next().status());
  return ok_status();
}

TEST_F(UploadTest, AClientThatReturnsBeforeTheEndHasNotWrittenTheObject) {
  constexpr int kWindows = 12;
  const std::vector<std::byte> bytes = some_bytes(kWindows * kMiB);
  for (const int count : {0, 1, kWindows - 1, kWindows}) {  // The last one never asks for more.
    SCOPED_TRACE(count);
    std::latch is_finishing(1);
    OtherClient client([&](Windows& windows) {
      RETURN_IF_ERROR(pull(windows, count));
      if (count >= kWindows - 1) is_finishing.wait();
      return ok_status();
    });
    Upload upload(client, kPath);
    upload.expect(ssize(bytes));
    std::thread finisher([&] {
      const Status finished = upload.finish(ssize(bytes));
      EXPECT_CODE(finished, StatusCode::kInternal);
      EXPECT_THAT(finished.message(), HasSubstr("before its end"));
    });
    std::thread after([&] {
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();  // So that `finish` has begun.
      is_finishing.count_down();
    });
    (void)write_windows(upload, bytes, kMiB, kWindows);
    after.join();
    finisher.join();
  }
}

// A client may stop its threads after it has returned. Until then, they read the memory.
TEST_F(UploadTest, AWriteWaitsForAWindowThatIsReleasedAfterAnError) {
  Window held;
  std::promise<void> has_returned;
  OtherClient client([&](Windows& windows) -> Status {
    ASSIGN_OR_RETURN(std::optional<Window> window, windows.next());
    held = *std::move(window);
    has_returned.set_value();
    return errno_status(EIO, "the store is gone");
  });
  const std::vector<std::byte> bytes = some_bytes(kPart + 1);
  std::atomic<bool> is_released = false;
  Upload upload(client, kPath);
  upload.expect(2 * kPart);
  std::thread writer([&] {
    EXPECT_EQ(upload.write(0, bytes, 2).error_number(), EIO);
    EXPECT_TRUE(is_released);
  });
  has_returned.get_future().wait();
  EXPECT_EQ(upload.finish(2 * kPart).error_number(), EIO);
  is_released = true;
  held.lease.reset();
  writer.join();
}

// Copies belong to the client: it may release them when there is no upload any more.
TEST_F(UploadTest, ACopiedWindowOutlivesItsUpload) {
  std::vector<Window> held;
  OtherClient client([&](Windows& windows) -> Status {
    ASSIGN_OR_RETURN(std::optional<Window> window, windows.next());
    held.push_back(*std::move(window));
    return errno_status(EIO, "the store is gone");
  });
  const std::vector<std::byte> bytes = some_bytes(kMiB);
  {
    Upload upload(client, kPath);
    upload.expect(2 * kPart);
    (void)upload.write(0, bytes, 1);
    EXPECT_EQ(upload.finish(2 * kPart).error_number(), EIO);
  }
  ASSERT_EQ(held.size(), 1u);
  EXPECT_TRUE(std::ranges::equal(held[0].bytes, bytes));
  held.clear();
}

TEST_F(UploadTest, AbandoningEndsEveryCallWhileTheClientStalls) {
  const std::vector<std::byte> bytes = some_bytes(4 * kPart);
  for (const int threads : {2, 24}) {
    MemoryObjectStore store;
    store.stall_transfers();
    Upload upload(store, kPath);
    upload.expect(ssize(bytes));
    Status finished;
    std::thread finisher([&] { finished = upload.finish(ssize(bytes)); });
    Status status;
    std::thread writer([&] { status = write_windows(upload, bytes, kMiB, threads); });
    store.wait_for_stalled(1);
    upload.abandon();
    finisher.join();  // It needs no answer of the store.
    EXPECT_CODE(finished, StatusCode::kCancelled);
    EXPECT_THAT(finished.message(), HasSubstr(kPath));
    store.resume_transfers();  // The writer's memory is in use until then.
    writer.join();
    EXPECT_CODE(status, StatusCode::kCancelled);
    EXPECT_THAT(store.paths(), IsEmpty());
  }
}

TEST_F(UploadTest, AfterItIsAbandonedNothingIsAskedOfTheStore) {
  const std::vector<std::byte> bytes = some_bytes(kPart + 1);
  for (const int64_t nbytes : {int64_t{1}, kPart + 1}) {
    Upload upload(store_, kPath);
    upload.abandon();
    EXPECT_CODE(upload.write(0, slice(Bytes(bytes), 0, nbytes), 2), StatusCode::kCancelled);
    EXPECT_CODE(upload.finish(nbytes), StatusCode::kCancelled);
  }
  EXPECT_THAT(store_.calls(), IsEmpty());
}

TEST_F(UploadTest, AnUploadThatIsNotFinishedLeavesNoObject) {
  const std::vector<std::byte> bytes = some_bytes(2 * kPart);
  {
    Upload upload(store_, kPath);
    upload.expect(4 * kPart);
    ASSERT_OK(write_windows(upload, bytes, 2 * kMiB, 4));
  }
  EXPECT_THAT(store_.paths(), IsEmpty());
  EXPECT_EQ(store_.count(StoreCall::Kind::kComplete), 0);
}

TEST_F(UploadTest, AThreadThatCannotBeStartedIsAnErrorOfEveryWrite) {
  constexpr int kThreads = 16;
  const std::vector<std::byte> bytes = some_bytes(2 * kPart);
  std::latch begun(kThreads + 1);
  std::vector<Status> all(kThreads);
  std::vector<std::thread> threads;
  upload_.expect(ssize(bytes));
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      begun.arrive_and_wait();
      if (i == 0) std::this_thread::yield();  // Others may wait for it by then.
      all[static_cast<size_t>(i)] =
          upload_.write(i * kMiB, slice(Bytes(bytes), i * kMiB, kMiB), kThreads);
    });
  }
  {
    const NoThreads no_threads;
    begun.arrive_and_wait();
    for (std::thread& thread : threads) thread.join();
  }
  for (const Status& status : all) {
    EXPECT_CODE(status, StatusCode::kStorage);
    EXPECT_THAT(status.message(), HasSubstr(str_cat("cannot start to upload ", kPath)));
  }
  EXPECT_CODE(upload_.finish(ssize(bytes)), StatusCode::kStorage);
}

TEST(PartTest, PartsAreFewEnoughForAnObjectThatDoubles) {
  for (const int64_t nbytes : {int64_t{0}, int64_t{1} << 30, int64_t{60} << 30, int64_t{5} << 40}) {
    const int64_t part = part_nbytes(nbytes);
    EXPECT_GE(part, kPart);
    EXPECT_LE(2 * nbytes / part, 10'000);
    EXPECT_LE(part, std::max(kPart, nbytes / 4'000));
  }
}

}  // namespace
}  // namespace torch_ckpt::upload_test
