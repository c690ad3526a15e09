// What io_uring has besides the contract of every queue (io_queue_test.cc).

#include "io/uring_queue.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "io/posix_file.h"
#include "io/posix_file_system.h"
#include "support/status_matchers.h"

#if TORCH_CKPT_HAVE_URING

namespace torch_ckpt::uring_queue_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBlock = 4096;
constexpr int64_t kArena = 256 * kBlock;

// RLIMIT_MEMLOCK is small on many machines. Memory that nobody may touch fails in the same place,
// for root as well.
TEST(UringQueueTest, GoesOnWithoutRegistrationWhenTheKernelRefusesTheMemory) {
  void* address = ::mmap(nullptr, kBlock, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(address, MAP_FAILED);
  const MutableBytes forbidden(static_cast<std::byte*>(address), kBlock);
  Result<std::unique_ptr<IoQueue>> queue = make_uring_queue(2);
  if (queue.status().code() == StatusCode::kUnsupported) GTEST_SKIP() << queue.status().message();
  ASSERT_OK(queue);
  (*queue)->register_memory(forbidden);
  EXPECT_FALSE((*queue)->mode().registered);
  EXPECT_THAT((*queue)->mode().reason, HasSubstr("cannot register 4096 bytes of buffers: "));
  ::munmap(address, kBlock);
}

// Registered memory counts against a limit until it is given back; jobs come one after another.
TEST(UringQueueTest, TheSameMemoryIsRegisteredAgainAndAgain) {
  ASSERT_OK_AND_ASSIGN(const Memory memory, HeapMemorySource().allocate(kArena));
  for (int round = 0; round < 20; ++round) {
    Result<std::unique_ptr<IoQueue>> queue = make_uring_queue(2);
    if (queue.status().code() == StatusCode::kUnsupported) GTEST_SKIP() << queue.status().message();
    ASSERT_OK(queue);
    const QueueMode& mode = (*queue)->mode();
    EXPECT_FALSE(mode.registered);
    (*queue)->register_memory(memory.bytes());
    if (round == 0 && !mode.registered) GTEST_SKIP() << mode.reason;  // The limit is very low here.
    EXPECT_TRUE(mode.registered) << mode.reason;
  }
}

// The kernel is reminded of what it is slow to do, and the reminder is taken for no request.
TEST(UringQueueTest, ASlowRequestEndsOnceAndAsItShould) {
  // A pipe in the place of a file: it is read when somebody has written to it.
  ASSERT_OK_AND_ASSIGN(const auto file,
                       PosixFile::open("/proc/version", OpenMode::kRead, Caching::kBuffered));
  std::array<int, 2> pipe;
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const int writer = pipe[1];
  ASSERT_EQ(::dup3(pipe[0], file->buffered_fd(), O_CLOEXEC), file->buffered_fd());
  ::close(pipe[0]);
  Result<std::unique_ptr<IoQueue>> queue = make_uring_queue(1);
  if (queue.status().code() == StatusCode::kUnsupported) GTEST_SKIP() << queue.status().message();
  std::array<std::byte, 8> memory = {};
  const IoRequest request{
      .kind = IoRequest::Kind::kRead, .file = file.get(), .memory = memory, .tag = 7};
  (*queue)->submit({&request, 1});
  std::thread slow_device([writer] {
    // Until the queue has waited in vain, thrice: nothing tells when.
    ::poll(nullptr, 0, 800);
    EXPECT_EQ(::write(writer, "contents", 8), 8);
  });
  const std::span<const IoDone> done = (*queue)->wait();
  slow_device.join();
  ::close(writer);
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].tag, 7U);
  EXPECT_OK(done[0].status);
  EXPECT_EQ(as_text(memory), "contents");
  EXPECT_EQ((*queue)->in_flight(), 0);
}

// A host program that closes every descriptor it does not know takes the ring away from under us.
// Requests must then fail: one that counted as in flight for ever would hang the destructor.
TEST(UringQueueTest, ALostRingGivesErrorsAndNoHang) {
  ASSERT_OK_AND_ASSIGN(const Memory memory, HeapMemorySource().allocate(2 * kBlock));
  PosixFileSystem fs;
  ASSERT_OK_AND_ASSIGN(const auto file,
                       fs.open("/proc/version", OpenMode::kRead, Caching::kBuffered));
  const int ring_fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // The next number to be used.
  ::close(ring_fd);
  Result<std::unique_ptr<IoQueue>> queue = make_uring_queue(2);
  if (queue.status().code() == StatusCode::kUnsupported) GTEST_SKIP() << queue.status().message();
  ASSERT_OK(queue);
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::dup3(nothing, ring_fd, O_CLOEXEC), ring_fd);
  ::close(nothing);

  const IoRequest one{IoRequest::Kind::kRead,           file.get(),         0,
                      slice(memory.bytes(), 0, kBlock), Caching::kBuffered, 1};
  (*queue)->submit(std::vector<IoRequest>{one, one});
  int done = 0;
  while ((*queue)->in_flight() > 0) {
    for (const IoDone& end : (*queue)->wait()) {
      EXPECT_EQ(end.status.code(), StatusCode::kStorage);
      EXPECT_THAT(end.status.message(), HasSubstr("cannot read 4096 bytes at 0 of /proc/version"));
      ++done;
    }
  }
  EXPECT_EQ(done, 2);
}

}  // namespace
}  // namespace torch_ckpt::uring_queue_test

#endif  // TORCH_CKPT_HAVE_URING
