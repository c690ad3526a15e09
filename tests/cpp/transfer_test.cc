// What a kernel may answer and a healthy disk seldom does: short transfers, interruptions, the end
// of a file at an awkward place. Driven here without a kernel, by saying what it returned.

#include "io/transfer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <memory>

#include "base/memory.h"
#include "io/posix_file_system.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"

namespace torch_ckpt::transfer_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBlock = PosixFile::kDirectAlignment;

class TransferTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<Memory> memory = HeapMemorySource().allocate(4 * kBlock);
    ASSERT_OK(memory);
    memory_ = std::move(*memory);
    Result<std::unique_ptr<PosixFile>> file =
        PosixFile::open(directory_.file("a"), OpenMode::kCreate, Caching::kDirect);
    ASSERT_OK(file);
    file_ = std::move(*file);
    if (file_->alignment() == 1) GTEST_SKIP() << file_->fallback_reason();
  }

  IoRequest request(IoRequest::Kind kind, Caching caching = Caching::kDirect) {
    IoRequest request{.kind = kind, .file = file_.get(), .offset = kBlock};
    request.memory = memory_.bytes();
    request.caching = caching;
    return request;
  }

  TempDirectory directory_;
  Memory memory_;
  std::unique_ptr<PosixFile> file_;
};

TEST_F(TransferTest, AShortDirectWriteGoesOnDirectAtABoundaryAndElseThroughTheCache) {
  // O_DIRECT would refuse what begins between boundaries with EINVAL.
  for (const int64_t moved : {2 * kBlock, int64_t{100}}) {
    Transfer transfer(request(IoRequest::Kind::kWrite));
    EXPECT_EQ(transfer.next().fd, file_->direct_fd());
    EXPECT_EQ(transfer.advance(moved), std::nullopt);
    const Transfer::Step step = transfer.next();
    EXPECT_EQ(step.fd, moved == 100 ? file_->buffered_fd() : file_->direct_fd());
    EXPECT_EQ(step.offset, kBlock + moved);
    EXPECT_EQ(step.nbytes, 4 * kBlock - moved);
    EXPECT_EQ(step.data, memory_.bytes().data() + moved);
    const auto status = transfer.advance(4 * kBlock - moved);
    ASSERT_TRUE(status.has_value());
    EXPECT_OK(*status);
  }
}

TEST_F(TransferTest, InterruptedTransfersAreTriedAgain) {
  Transfer transfer(request(IoRequest::Kind::kWrite));
  EXPECT_EQ(transfer.advance(-EINTR), std::nullopt);
  EXPECT_EQ(transfer.advance(-EAGAIN), std::nullopt);
  EXPECT_EQ(transfer.next().offset, kBlock);
}

// A kernel that always says "again" must become an error, not a hang of the training run.
TEST_F(TransferTest, EndlessRetriesBecomeAnError) {
  Transfer transfer(request(IoRequest::Kind::kWrite));
  std::optional<Status> status;
  for (int i = 0; i < 1'000'000 && !status; ++i) status = transfer.advance(-EAGAIN);
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->error_number(), EAGAIN);
}

// The kernel reports a lost write once: a second fsync could say OK for bytes that are gone.
TEST_F(TransferTest, AFailedSyncIsNeverTriedAgain) {
  for (const int error : {EIO, EINTR, EAGAIN}) {
    Transfer transfer(request(IoRequest::Kind::kSync));
    const auto status = transfer.advance(-error);
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->error_number(), error);
    EXPECT_THAT(status->message(), HasSubstr("cannot sync " + file_->path()));
  }
}

TEST_F(TransferTest, AnErrorNamesBytesOffsetAndPathAndSoDoesAWriteThatMovesNothing) {
  for (const int64_t result : {-ENOSPC, 0}) {
    Transfer transfer(request(IoRequest::Kind::kWrite));
    const auto status = transfer.advance(result);
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->code(), StatusCode::kStorage);
    EXPECT_THAT(status->message(),
                HasSubstr("cannot write 16384 bytes at 4096 of " + file_->path() + ": "));
  }
}

// A signal may cut a read short before the end of the file; only the file's size tells the two
// apart.
TEST_F(TransferTest, AShortDirectReadBeforeTheEndGoesOn) {
  ASSERT_OK(file_->truncate(5 * kBlock));
  Transfer transfer(request(IoRequest::Kind::kRead));
  EXPECT_EQ(transfer.advance(4 * kBlock - 10), std::nullopt);
  const Transfer::Step step = transfer.next();
  EXPECT_EQ(step.fd, file_->buffered_fd());
  EXPECT_EQ(step.nbytes, 10u);
}

// One system call carries at most about 2 GiB, and a request any number of bytes.
TEST_F(TransferTest, AHugeRequestTakesSeveralSteps) {
  const int64_t gib = int64_t{1} << 30;
  const size_t nbytes = static_cast<size_t>(2 * gib + kBlock);
  void* address = ::mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(address, MAP_FAILED);  // Only addresses are needed: nothing here touches the bytes.
  IoRequest huge = request(IoRequest::Kind::kWrite);
  huge.memory = MutableBytes(static_cast<std::byte*>(address), nbytes);
  Transfer transfer(huge);
  EXPECT_EQ(transfer.next().nbytes, gib);
  EXPECT_EQ(transfer.advance(gib), std::nullopt);
  EXPECT_EQ(transfer.advance(gib), std::nullopt);
  EXPECT_EQ(transfer.next().nbytes, kBlock);
  EXPECT_EQ(transfer.next().offset, 2 * gib + kBlock);
  EXPECT_TRUE(transfer.advance(kBlock).has_value());
  ::munmap(address, nbytes);
}

}  // namespace
}  // namespace torch_ckpt::transfer_test
