#include "engine/copy_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::copy_job_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPiece = int64_t{8} << 20;

struct Copied {
  MemoryFileSystem fs;
  std::string contents;
  std::shared_ptr<Index> index = std::make_shared<Index>();

  explicit Copied(int64_t nbytes) : contents(as_text(random_bytes(nbytes, 1))) {
    BlockSummer summer(kSumBlockNbytes);
    summer.append(as_bytes(contents));
    index->save_id = "0123456789abcdef";
    index->files = {{"a", summer.finish()}};
    fs.put("c/a", contents);
  }
  Status copy(CopyJob& job) { return job.copy(0, fs, "c/a", fs, "d/a"); }
  Status copy() {
    CopyJob job(opened(*index), 0);
    return copy(job);
  }
};

TEST(CopyJobTest, FilesOfEveryLengthArriveUnchanged) {
  for (const int64_t nbytes :
       {int64_t{0}, int64_t{1}, kSumBlockNbytes, kPiece - 1, kPiece, kPiece + 1, 2 * kPiece + 77}) {
    Copied a(nbytes);
    ASSERT_OK(a.copy());
    EXPECT_EQ(a.fs.contents("d/a"), a.contents) << nbytes;
  }
}

TEST(CopyJobTest, ADamagedBlockIsNamedWhereverItIs) {
  for (const int64_t at : {int64_t{0}, kPiece - 1, kPiece, 2 * kPiece + 76}) {
    Copied a(2 * kPiece + 77);
    a.contents[static_cast<size_t>(at)] ^= 1;
    a.fs.put("c/a", a.contents);
    const Status status = a.copy();
    EXPECT_CODE(status, StatusCode::kCorruption);
    EXPECT_THAT(status.message(),
                HasSubstr(str_cat("block at ", align_down(at, kSumBlockNbytes), " ")));
  }
}

TEST(CopyJobTest, AFileOfAnotherLengthIsRefused) {
  for (const int64_t nbytes : {int64_t{0}, kPiece, kPiece + 76, kPiece + 78, 2 * kPiece + 77}) {
    Copied a(kPiece + 77);
    auto other = a.contents + a.contents;
    other.resize(static_cast<size_t>(nbytes));
    a.fs.put("c/a", other);
    EXPECT_CODE(a.copy(), StatusCode::kCorruption) << nbytes;
  }
}

TEST(CopyJobTest, AFileOutsideTheIndexIsAnError) {
  Copied a(10);
  CopyJob job(opened(*a.index), 0);
  EXPECT_CODE(job.copy(1, a.fs, "c/a", a.fs, "d/a"), StatusCode::kInvalidArgument);
}

TEST(CopyJobTest, TheRateHoldsAcrossFiles) {
  Copied a(2 * kPiece);
  CopyJob job(opened(*a.index), 10 * kPiece);
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_OK(a.copy(job));
  ASSERT_OK(job.copy(0, a.fs, "c/a", a.fs, "d/b"));
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(lasted.count(), 0.4);
  EXPECT_EQ(job.copied_nbytes(), 4 * kPiece);
}

TEST(CopyJobTest, TheRateHoldsForAFileThatIsShorterThanAPiece) {
  Copied a(kPiece / 2);
  CopyJob job(opened(*a.index), 2 * kPiece);
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_OK(a.copy(job));
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(lasted.count(), 0.25);
}

TEST(CopyJobTest, NoPieceIsLongerThanTheRateAllowsInASecond) {
  Copied a(kPiece);
  CopyJob job(opened(*a.index), kPiece - 1);
  std::thread copying([&] { EXPECT_CODE(a.copy(job), StatusCode::kCancelled); });
  while (job.copied_nbytes() == 0) std::this_thread::yield();
  job.cancel();
  copying.join();
  EXPECT_LE(job.copied_nbytes(), kPiece / 2);
}

TEST(CopyJobTest, ACancelledCopyEndsSoonAndStaysCancelled) {
  Copied a(2 * kPiece);
  CopyJob job(opened(*a.index), 1);  // The first block would wait for hours.
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    job.cancel();
  });
  EXPECT_CODE(a.copy(job), StatusCode::kCancelled);
  other.join();
  EXPECT_CODE(job.copy(0, a.fs, "c/a", a.fs, "d/b"), StatusCode::kCancelled);
}

}  // namespace
}  // namespace torch_ckpt::copy_job_test
