// A SaveJob over a store writes the bytes that it writes to a disk, whatever memory it has.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/save/save_job.h"
#include "support/deadline.h"
#include "support/memory_file_system.h"
#include "support/memory_object_store.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::store_save_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = StoreCall::Kind;

constexpr char kPath[] = "bucket/step-1/a.distcp";
constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;

// Tensors, and pickled objects of such lengths behind them.
struct Work {
  std::vector<TestTensor> tensors;
  std::vector<std::vector<std::byte>> objects;

  Work(const std::vector<int64_t>& tensor_nbytes, const std::vector<int64_t>& object_nbytes) {
    for (const int64_t nbytes : tensor_nbytes) {
      const auto number = static_cast<uint32_t>(tensors.size());
      const Dims sizes = {nbytes / 64, 32};
      auto tensor = TestTensor::random(str_cat("t", number), DType::kInt16, sizes, number + 1);
      tensors.push_back(number % 2 == 0 ? tensor : tensor.transposed(0, 1));
    }
    for (const int64_t nbytes : object_nbytes) objects.push_back(random_bytes(nbytes, 99));
  }
};

Status write_all(SaveJob& job, const Work& work) {
  for (size_t i = 0; i < work.tensors.size(); ++i) {
    RETURN_IF_ERROR(job.write(static_cast<int64_t>(i), work.tensors[i].live));
  }
  for (const auto& object : work.objects) RETURN_IF_ERROR(job.append(object).status());
  return job.finish();
}

Status save(FileSystem& fs, const Work& work, BufferPool& pool) {
  ASSIGN_OR_RETURN(const auto job, SaveJob::start(fs, kPath, layout_of(work.tensors), pool, {}));
  return write_all(*job, work);
}

// What a save writes to a disk.
std::string on_disk(const Work& work) {
  MemoryFileSystem disk;
  const auto pool = make_pool(kMiB, 64 * kKiB);
  EXPECT_OK(save(disk, work, *pool));
  return *disk.contents(kPath);
}

struct PoolSize {
  int64_t nbytes;
  int64_t block_nbytes;
};

// From the least budget, with which no part is ever in the pool, to more than two parts. Some
// blocks do not divide a part.
constexpr PoolSize kPools[] = {
    {512 * kKiB, 256 * kKiB}, {5448 * kKiB, 2724 * kKiB}, {8 * kMiB, 4 * kMiB},
    {9 * kMiB, kMiB},         {12 * kMiB, 3 * kMiB},      {24 * kMiB, 12 * kMiB},
    {24 * kMiB, 4 * kMiB},    {32 * kMiB, 8 * kMiB},
};

class StoreSaveTest : public testing::Test {
 protected:
  // Saves the work with every pool, and compares the object with the file.
  void expect_equal_files(const Work& work) {
    const std::string expected = on_disk(work);
    for (const PoolSize& size : kPools) {
      SCOPED_TRACE(str_cat(size.nbytes, " bytes in blocks of ", size.block_nbytes));
      MemoryStoreFileSystem fs;
      const auto pool = make_pool(size.nbytes, size.block_nbytes);
      ASSERT_OK(save(fs, work, *pool));
      EXPECT_TRUE(fs.store.contents(kPath) == expected);
      EXPECT_THAT(fs.store.paths(), ElementsAre(kPath));
      EXPECT_EQ(pool->free_count(), pool->block_count());
      EXPECT_TRUE(pool->claim());
    }
  }

  Deadline deadline_;
};

TEST_F(StoreSaveTest, ALongFileHasTheSameBytesAsOnDisk) {
  expect_equal_files(Work({9 * kMiB, 100, 8 * kMiB}, {}));
  expect_equal_files(Work({14 * kMiB}, {}));  // The last part has two windows of 4 MiB, one short.
}

TEST_F(StoreSaveTest, AShortFileHasTheSameBytesAsOnDisk) {
  expect_equal_files(Work({3 * kMiB, 64}, {1000}));
  expect_equal_files(Work({}, {}));
}

TEST_F(StoreSaveTest, AFileThatObjectsMakeLongHasTheSameBytesAsOnDisk) {
  expect_equal_files(Work({kMiB}, {10, 0, 9 * kMiB, 5}));
  expect_equal_files(Work({}, {17 * kMiB}));
}

// The bytes of a long tensor are passed without a copy, and `settle` returns before the file ends.
TEST_F(StoreSaveTest, WholePartsAreWrittenFromTheMemoryOfATensor) {
  class SeenWindows : public MemoryObjectStore {
   public:
    Status put_stream(const std::string& path, int64_t part_nbytes, Windows& windows) override {
      class Seen : public Windows {
       public:
        Seen(Windows& from, std::vector<const std::byte*>& seen) : from_(from), seen_(seen) {}
        Result<std::optional<Window>> next() override {
          auto window = from_.next();
          if (window.ok() && *window) seen_.push_back((*window)->bytes.data());
          return window;
        }

       private:
        Windows& from_;
        std::vector<const std::byte*>& seen_;
      };
      Seen seen(windows, addresses);
      return MemoryObjectStore::put_stream(path, part_nbytes, seen);
    }
    std::vector<const std::byte*> addresses;
  };
  for (const PoolSize& size : kPools) {
    SCOPED_TRACE(str_cat(size.nbytes, " bytes in blocks of ", size.block_nbytes));
    const Work work({18 * kMiB, 3 * kMiB, 17 * kMiB}, {});
    const std::string expected = on_disk(work);
    auto store = std::make_unique<SeenWindows>();
    SeenWindows& seen = *store;
    StoreFileSystem fs(std::move(store));
    const auto pool = make_pool(size.nbytes, size.block_nbytes);
    const Layout layout = layout_of(work.tensors);
    ASSERT_OK_AND_ASSIGN(const auto job, SaveJob::start(fs, kPath, layout, *pool, {}));
    for (size_t i = 0; i < work.tensors.size(); ++i) {
      ASSERT_OK(job->write(static_cast<int64_t>(i), work.tensors[i].live));
      ASSERT_OK(job->settle());
      std::ranges::fill(*work.tensors[i].memory, std::byte{0xee});  // The job no longer uses it.
    }
    ASSERT_OK(job->finish());
    EXPECT_TRUE(seen.contents(kPath) == expected);
    int64_t in_place = 0;
    for (const auto& tensor : work.tensors) {
      const std::vector<std::byte>& memory = *tensor.memory;
      in_place += std::ranges::count_if(seen.addresses, [&](const std::byte* at) {
        return at >= memory.data() && at < memory.data() + memory.size();
      });
    }
    const int64_t whole = size.block_nbytes == 8 * kMiB    ? 2
                          : size.block_nbytes == 12 * kMiB ? 1
                                                           : 0;
    EXPECT_EQ(in_place, whole);
  }
}

// A save that has failed elsewhere waits for the part that the client has, and for no other one.
TEST_F(StoreSaveTest, ACancelledSavePassesNoMorePartsFromTheMemoryOfATensor) {
  class SlowParts : public MemoryObjectStore {
   public:
    Status put_stream(const std::string&, int64_t, Windows& windows) override {
      for (;;) {
        ASSIGN_OR_RETURN(const std::optional<Window> window, windows.next());
        if (!window) return ok_status();
        ++parts;
        cancelled.wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
      }
    }
    std::latch cancelled{1};
    std::atomic<int> parts = 0;
  };
  auto made = std::make_unique<SlowParts>();
  SlowParts& store = *made;
  StoreFileSystem fs(std::move(made));
  const Work work({41 * kMiB}, {});
  const auto pool = make_pool(64 * kMiB, 8 * kMiB);
  const Layout layout = layout_of(work.tensors);
  ASSERT_OK_AND_ASSIGN(const auto job, SaveJob::start(fs, kPath, layout, *pool, {}));
  ASSERT_OK(job->write(0, work.tensors[0].live));
  job->cancel();
  store.cancelled.count_down();
  const Status status = job->settle();
  EXPECT_CODE(status, StatusCode::kCancelled);
  EXPECT_THAT(status.message(), testing::HasSubstr("the save has failed elsewhere"));
  EXPECT_LE(store.parts, 1);
}

TEST_F(StoreSaveTest, AQueueWithFewThreadsWritesALongFile) {
  const Work work({17 * kMiB}, {});
  MemoryStoreFileSystem fs;
  const auto pool = make_pool(24 * kMiB, 4 * kMiB);
  const auto job = [&] {
    const NoThreads no_threads;
    return std::move(*SaveJob::start(fs, kPath, layout_of(work.tensors), *pool, {}));
  }();
  EXPECT_THAT(job->mode().queue.reason, HasSubstr("only 0 threads"));
  ASSERT_OK(write_all(*job, work));
  EXPECT_TRUE(fs.store.contents(kPath) == on_disk(work));
}

TEST_F(StoreSaveTest, WithoutAThreadForTheClientTheSaveIsAnError) {
  const Work work({17 * kMiB}, {});
  MemoryStoreFileSystem fs;
  const auto pool = make_pool(24 * kMiB, 4 * kMiB);
  {
    const NoThreads no_threads;
    const Status status = save(fs, work, *pool);
    EXPECT_CODE(status, StatusCode::kStorage);
    EXPECT_THAT(status.message(), HasSubstr(str_cat("cannot start to upload ", kPath)));
  }
  EXPECT_EQ(pool->free_count(), pool->block_count());
  EXPECT_THAT(fs.store.paths(), IsEmpty());
}

TEST_F(StoreSaveTest, AnyFailedCallLeavesNoObjectAndFreesEveryBlock) {
  const Work large({9 * kMiB, 8 * kMiB}, {kMiB});
  const Work small({kMiB}, {100});
  for (const PoolSize& size : {kPools[0], kPools[2], kPools[6]}) {
    const auto pool = make_pool(size.nbytes, size.block_nbytes);
    for (const Work* work : {&large, &small}) {
      for (const bool is_carried_out : {false, true}) {
        for (int64_t n = 0;; ++n) {
          SCOPED_TRACE(str_cat("call ", n, ", blocks of ", size.block_nbytes));
          MemoryStoreFileSystem fs;
          fs.store.fail_call(n, errno_status(EHOSTUNREACH, "no store"), is_carried_out);
          const Status status = save(fs, *work, *pool);
          EXPECT_EQ(pool->free_count(), pool->block_count());
          if (!fs.store.clear_fault()) {
            ASSERT_OK(status);
            EXPECT_EQ(n, work == &large ? 5 : 1);  // The stream, three parts, its end.
            break;
          }
          EXPECT_EQ(status.error_number(), EHOSTUNREACH) << status.to_string();
          EXPECT_THAT(fs.store.paths(), IsEmpty());
          EXPECT_EQ(fs.store.held_nbytes(), 0);
        }
      }
    }
  }
}

TEST_F(StoreSaveTest, AStoreThatIsGoneFailsTheSave) {
  const Work work({17 * kMiB}, {});
  for (int64_t n = 0; n < 3; ++n) {
    MemoryStoreFileSystem fs;
    fs.store.fail_from(n, errno_status(ENETDOWN, "no network"));
    const auto pool = make_pool(512 * kKiB, 256 * kKiB);
    EXPECT_EQ(save(fs, work, *pool).error_number(), ENETDOWN);
    EXPECT_EQ(pool->free_count(), pool->block_count());
  }
}

TEST_F(StoreSaveTest, ASaveThatIsCancelledWhileTheStoreStallsLeavesNothing) {
  const Work work({33 * kMiB}, {});
  for (const PoolSize& size : {kPools[0], kPools[2], kPools[6]}) {
    SCOPED_TRACE(size.block_nbytes);
    MemoryStoreFileSystem fs;
    fs.store.stall_transfers();
    const auto pool = make_pool(size.nbytes, size.block_nbytes);
    auto job = std::move(*SaveJob::start(fs, kPath, layout_of(work.tensors), *pool, {}));
    Status status;
    std::thread writer([&] { status = write_all(*job, work); });
    fs.store.wait_for_stalled(1);
    job->cancel();
    fs.store.resume_transfers();
    writer.join();
    EXPECT_CODE(status, StatusCode::kCancelled);
    job.reset();
    EXPECT_EQ(pool->free_count(), pool->block_count());
    EXPECT_THAT(fs.store.paths(), IsEmpty());
    EXPECT_EQ(fs.store.count(Kind::kComplete), 0);
  }
}

TEST_F(StoreSaveTest, ASaveThatIsAbortedInTheMiddleLeavesNothing) {
  const Work work({3 * kMiB, 6 * kMiB, 8 * kMiB, kMiB}, {});
  for (const PoolSize& size : kPools) {
    for (int64_t count = 0; count <= 4; ++count) {
      SCOPED_TRACE(str_cat(count, " tensors, blocks of ", size.block_nbytes));
      MemoryStoreFileSystem fs;
      const auto pool = make_pool(size.nbytes, size.block_nbytes);
      const Layout layout = layout_of(work.tensors);
      ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs, kPath, layout, *pool, {}));
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_OK(job->write(i, work.tensors[static_cast<size_t>(i)].live));
      }
      job->abort();
      EXPECT_CODE(job->finish(), StatusCode::kCancelled);
      EXPECT_EQ(pool->free_count(), pool->block_count());
      EXPECT_THAT(fs.store.paths(), IsEmpty());
      EXPECT_EQ(fs.store.count(Kind::kComplete), 0);
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::store_save_test
