// The contract of IoQueue, run by every queue of this build, direct and buffered.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/memory.h"
#include "io/posix_file_system.h"
#include "io/thread_queue.h"
#include "io/uring_queue.h"
#include "support/deadline.h"
#include "support/memory_object_store.h"
#include "support/read_file.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"

namespace torch_ckpt::io_queue_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

constexpr int64_t kBlock = 4096;
constexpr int64_t kArena = 256 * kBlock;

enum class QueueKind { kUring, kUringUnregistered, kThreads, kStore };

Result<std::unique_ptr<IoQueue>> make_queue_of(QueueKind kind, int depth) {
  if (kind == QueueKind::kThreads) return make_thread_queue(depth, "asked for");
#if TORCH_CKPT_HAVE_URING
  return make_uring_queue(depth);
#else
  return unsupported("built without liburing");
#endif
}

class IoQueueTest : public testing::TestWithParam<std::tuple<QueueKind, Caching>> {
 protected:
  void SetUp() override {
    Result<Memory> memory = HeapMemorySource().allocate(kArena);
    ASSERT_OK(memory);
    memory_ = std::move(*memory);
    if (is_store()) return;
    Result<std::unique_ptr<IoQueue>> probe = make_queue_of(std::get<0>(GetParam()), 1);
    if (probe.status().code() == StatusCode::kUnsupported) GTEST_SKIP() << probe.status().message();
    ASSERT_OK(probe);
  }

  MutableBytes arena() { return memory_.bytes(); }
  Caching caching() const { return std::get<1>(GetParam()); }
  bool is_store() const { return std::get<0>(GetParam()) == QueueKind::kStore; }
  FileSystem& fs() { return is_store() ? static_cast<FileSystem&>(store_) : disk_; }
  bool writes_at_offsets() { return fs().traits().writes_at_offsets; }

  std::unique_ptr<IoQueue> make_queue(int depth) {
    const QueueKind kind = std::get<0>(GetParam());
    if (is_store()) return store_.make_queue(depth);
    Result<std::unique_ptr<IoQueue>> queue = make_queue_of(kind, depth);
    EXPECT_OK(queue);
    if (kind != QueueKind::kUringUnregistered) (*queue)->register_memory(arena());
    return std::move(*queue);
  }

  std::unique_ptr<File> open(const std::string& name, OpenMode mode) {
    Result<std::unique_ptr<File>> file = fs().open(directory_.file(name), mode, caching());
    EXPECT_OK(file);
    return std::move(*file);
  }

  // A file of `nbytes` bytes whose byte i is byte_at(i), to be read.
  std::unique_ptr<File> filled(const std::string& name, int64_t nbytes) {
    std::vector<std::byte> bytes(static_cast<size_t>(nbytes));
    for (int64_t i = 0; i < nbytes; ++i) bytes[static_cast<size_t>(i)] = byte_at(i);
    EXPECT_OK(write_file(fs(), directory_.file(name), bytes, true));
    return open(name, OpenMode::kRead);
  }
  static std::byte byte_at(int64_t i) { return static_cast<std::byte>((i * 31 + i / 256) & 0xFF); }

  IoRequest request(IoRequest::Kind kind, File* file, int64_t offset, MutableBytes memory,
                    uint64_t tag = 0) const {
    return {kind, file, offset, memory, caching(), tag};
  }
  IoRequest read(File* file, int64_t offset, MutableBytes memory, uint64_t tag = 0) const {
    return request(IoRequest::Kind::kRead, file, offset, memory, tag);
  }
  IoRequest write(File* file, int64_t offset, MutableBytes memory, uint64_t tag = 0) const {
    return request(IoRequest::Kind::kWrite, file, offset, memory, tag);
  }
  IoRequest sync(File* file, uint64_t tag = 0) const {
    return request(IoRequest::Kind::kSync, file, 0, {}, tag);
  }

  // Submits one request to an idle queue and returns how it ended.
  static Status run(IoQueue& queue, const IoRequest& one) {
    queue.submit({&one, 1});
    const auto done = queue.wait();
    EXPECT_EQ(done.size(), 1u);
    if (done.empty()) return internal_error("nothing was done");
    EXPECT_EQ(done.front().tag, one.tag);
    return done.front().status;
  }

  PosixFileSystem disk_;
  MemoryStoreFileSystem store_;
  TempDirectory directory_;
  Memory memory_;
};

std::string param_name(const testing::TestParamInfo<std::tuple<QueueKind, Caching>>& info) {
  const QueueKind kind = std::get<0>(info.param);
  std::string name = kind == QueueKind::kUring               ? "Uring"
                     : kind == QueueKind::kUringUnregistered ? "UringUnregistered"
                     : kind == QueueKind::kThreads           ? "Threads"
                                                             : "Store";
  return name + (std::get<1>(info.param) == Caching::kDirect ? "Direct" : "Buffered");
}

INSTANTIATE_TEST_SUITE_P(Queues, IoQueueTest,
                         testing::Combine(testing::Values(QueueKind::kUring,
                                                          QueueKind::kUringUnregistered,
                                                          QueueKind::kThreads, QueueKind::kStore),
                                          testing::Values(Caching::kDirect, Caching::kBuffered)),
                         param_name);

TEST_P(IoQueueTest, SaysHowItMovesBytesAndWhyNotFaster) {
  const auto queue = make_queue(2);
  const bool threads = std::get<0>(GetParam()) == QueueKind::kThreads;
  EXPECT_EQ(queue->mode().name, is_store() ? "requests" : threads ? "threads" : "io_uring");
  const bool best =
      is_store() || (std::get<0>(GetParam()) == QueueKind::kUring && queue->mode().registered);
  EXPECT_EQ(queue->mode().reason.empty(), best) << queue->mode().reason;
}

// The everyday load: many requests in flight, handed over and finished in any order.
TEST_P(IoQueueTest, ReadsBackWhatManyRequestsWroteOutOfOrder) {
  if (!writes_at_offsets()) GTEST_SKIP() << "a stream has an order";
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (std::byte& byte : arena()) byte = static_cast<std::byte>(random());
  const std::vector<std::byte> expected(arena().begin(), arena().end());

  const auto queue = make_queue(13);
  const auto file = open("a", OpenMode::kCreate);
  std::vector<int64_t> cuts;  // In blocks, at uneven distances.
  for (int64_t at = 0; at < kArena / kBlock; at += 1 + static_cast<int64_t>(random() % 7)) {
    cuts.push_back(at);
  }
  cuts.push_back(kArena / kBlock);

  for (const auto kind : {IoRequest::Kind::kWrite, IoRequest::Kind::kRead}) {
    if (kind == IoRequest::Kind::kRead) std::ranges::fill(arena(), std::byte{0});
    std::vector<size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::shuffle(order, random);
    std::map<uint64_t, int> seen;
    size_t next = 0;
    while (next < order.size() || queue->in_flight() > 0) {
      std::vector<IoRequest> batch;
      const size_t wanted = random() % 6;
      while (next < order.size() && std::ssize(batch) < queue->room() && batch.size() < wanted) {
        const size_t part = order[next++];
        const int64_t begin = cuts[part] * kBlock;
        const MutableBytes memory = slice(arena(), begin, (cuts[part + 1] - cuts[part]) * kBlock);
        batch.push_back(request(kind, file.get(), begin, memory, part));
      }
      queue->submit(batch);
      if (queue->in_flight() == 0) continue;
      for (const IoDone& done : queue->wait()) {
        ASSERT_OK(done.status);
        ++seen[done.tag];
      }
    }
    EXPECT_EQ(seen.size(), order.size());
    EXPECT_TRUE(std::ranges::all_of(seen, [](const auto& entry) { return entry.second == 1; }));
  }
  EXPECT_TRUE(std::ranges::equal(arena(), expected));
  EXPECT_OK(run(*queue, sync(file.get(), 2)));
}

// What is in flight is memory that cannot be used, so the bound is a promise.
TEST_P(IoQueueTest, RoomAndInFlightAddUpToTheDepth) {
  const auto queue = make_queue(3);
  const auto file = filled("a", 4 * kBlock);
  EXPECT_EQ(queue->room(), 3);
  EXPECT_EQ(queue->in_flight(), 0);
  for (int i = 0; i < 3; ++i) {
    const IoRequest one = read(file.get(), 0, slice(arena(), i * kBlock, kBlock));
    queue->submit({&one, 1});
    EXPECT_EQ(queue->room(), 2 - i);
    EXPECT_EQ(queue->in_flight(), i + 1);
  }
  int done = 0;
  while (done < 3) {
    done += static_cast<int>(queue->wait().size());
    EXPECT_EQ(queue->room(), done);
    EXPECT_EQ(queue->in_flight(), 3 - done);
  }
  EXPECT_EQ(make_queue(0)->room(), 1);
}

// Bugs of a caller. Neither may hang or crash the training run around us.
TEST_P(IoQueueTest, MisuseIsAnErrorAndNeverAHang) {
  const auto queue = make_queue(1);
  const auto file = filled("a", kBlock);
  EXPECT_TRUE(queue->wait().empty());  // Nothing in flight.

  const IoRequest one = read(file.get(), 0, slice(arena(), 0, kBlock), 1);
  const IoRequest two = read(file.get(), 0, slice(arena(), kBlock, kBlock), 2);
  queue->submit(std::vector<IoRequest>{one, two});  // More than room().
  std::map<uint64_t, StatusCode> ends;
  while (queue->in_flight() > 0) {
    for (const IoDone& done : queue->wait()) ends[done.tag] = done.status.code();
  }
  EXPECT_EQ(ends[1], StatusCode::kOk);
  EXPECT_EQ(ends[2], StatusCode::kInternal);

  EXPECT_CODE(run(*queue, read(nullptr, 0, slice(arena(), 0, kBlock))), StatusCode::kInternal);
  EXPECT_CODE(run(*queue, read(file.get(), -kBlock, slice(arena(), 0, kBlock))),
              StatusCode::kInvalidArgument);
}

// The kernel would say EINVAL, which says nothing.
TEST_P(IoQueueTest, AMisalignedDirectRequestIsRefusedByName) {
  const auto queue = make_queue(1);
  const auto file = filled("a", 3 * kBlock);
  const bool direct = file->alignment() > 1;
  for (const IoRequest& odd : {read(file.get(), 1, slice(arena(), 0, kBlock)),
                               read(file.get(), 0, slice(arena(), 0, kBlock - 1)),
                               read(file.get(), 0, slice(arena(), 1, kBlock))}) {
    const Status status = run(*queue, odd);
    EXPECT_EQ(status.code(), direct ? StatusCode::kInvalidArgument : StatusCode::kOk);
  }
  EXPECT_OK(run(*queue, read(file.get(), 0, {}, 7)));
  // The other descriptor of the same file takes any of them.
  IoRequest buffered = read(file.get(), 1, slice(arena(), 1, kBlock - 1));
  buffered.caching = Caching::kBuffered;
  EXPECT_OK(run(*queue, buffered));
  EXPECT_EQ(arena()[1], byte_at(1));
}

// Tensors are read straight into place where they can be; that memory was never registered.
TEST_P(IoQueueTest, MemoryOutsideTheRegisteredArenaWorksToo) {
  ASSERT_OK_AND_ASSIGN(const Memory other, HeapMemorySource().allocate(2 * kBlock));
  const auto queue = make_queue(1);
  const auto file = filled("a", 2 * kBlock);
  ASSERT_OK(run(*queue, read(file.get(), kBlock, slice(other.bytes(), 0, kBlock))));
  EXPECT_EQ(other.bytes()[5], byte_at(kBlock + 5));
}

// A truncated checkpoint: the message is all that its owner gets to see.
TEST_P(IoQueueTest, ReadingPastTheEndNamesBytesOffsetPathAndEnd) {
  const auto queue = make_queue(1);
  const auto file = filled("a", kBlock + 100);
  const Status status = run(*queue, read(file.get(), kBlock, slice(arena(), 0, 2 * kBlock)));
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_EQ(status.message(), "cannot read 8192 bytes at 4096 of " + directory_.file("a") +
                                  ": the file ends at 4196");

  const Status beyond = run(*queue, read(file.get(), 4 * kBlock, slice(arena(), 0, kBlock)));
  EXPECT_EQ(beyond.code(), StatusCode::kCorruption);
  EXPECT_THAT(beyond.message(), EndsWith(": the file ends at 4196"));
}

// The last direct read of a file has to be rounded up. Only that much is forgiven: a file that
// lacks a whole block is torn.
TEST_P(IoQueueTest, OnlyADirectReadMayReachPastTheEndUpToTheNextBoundary) {
  const auto queue = make_queue(1);
  for (const int64_t nbytes :
       {int64_t{1}, kBlock - 1, kBlock, kBlock + 1, 2 * kBlock, 3 * kBlock}) {
    SCOPED_TRACE(testing::Message() << "a file of " << nbytes << " bytes");
    const auto file = filled(std::to_string(nbytes), nbytes);
    for (int64_t begin = 0; begin < 4 * kBlock; begin += kBlock) {
      for (int64_t length = kBlock; length <= 4 * kBlock; length += kBlock) {
        SCOPED_TRACE(testing::Message() << "[" << begin << ", " << begin + length << ")");
        std::ranges::fill(arena(), std::byte{0});
        const MutableBytes memory = slice(arena(), 0, length);
        const Status status = run(*queue, read(file.get(), begin, memory));
        // What has to exist: all of it, or for a direct read the first byte of the last block.
        const int64_t needed = begin + length - (file->alignment() - 1);
        EXPECT_EQ(status.code(), nbytes >= needed ? StatusCode::kOk : StatusCode::kCorruption)
            << status.to_string();
        if (!status.ok() && !writes_at_offsets()) continue;  // A store reads all or nothing.
        for (int64_t at = begin; at < std::min(nbytes, begin + length); ++at) {
          ASSERT_EQ(memory[static_cast<size_t>(at - begin)], byte_at(at)) << at;
        }
      }
    }
  }
}

TEST_P(IoQueueTest, WritingToAFileOpenedForReadingFails) {
  const auto queue = make_queue(1);
  const auto file = filled("a", kBlock);
  const Status status = run(*queue, write(file.get(), 0, slice(arena(), 0, kBlock)));
  EXPECT_EQ(status.code(), StatusCode::kStorage);
  EXPECT_EQ(status.error_number(), EBADF);
  EXPECT_THAT(status.message(), HasSubstr("cannot write 4096 bytes at 0 of "));
}

// A limit on file sizes, as batch systems set. The signal that comes with it is ignored by Python,
// and so here.
TEST_P(IoQueueTest, AFileSizeLimitIsAnErrorOfTheWrite) {
  if (!writes_at_offsets()) GTEST_SKIP() << "no file of the system";
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto queue = make_queue(1);
  const auto file = open("a", OpenMode::kCreate);

  rlimit lower = before;
  lower.rlim_cur = static_cast<rlim_t>(2 * kBlock);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &lower), 0);
  const Status beyond = run(*queue, write(file.get(), 2 * kBlock, slice(arena(), 0, kBlock)));
  // Half of it fits: the short write is resumed, and then fails.
  const Status across = run(*queue, write(file.get(), kBlock, slice(arena(), 0, 2 * kBlock)));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, old_handler);

  EXPECT_EQ(beyond.code(), StatusCode::kStorage);
  EXPECT_EQ(beyond.error_number(), EFBIG) << beyond.to_string();
  EXPECT_EQ(across.error_number(), EFBIG) << across.to_string();
}

// A job that fails drops its queue while the disk still works on its buffers.
TEST_P(IoQueueTest, DestructionWaitsForWhatIsInFlight) {
  if (!writes_at_offsets()) GTEST_SKIP() << "a stream ends with kSync";
  for (int64_t i = 0; i < kArena; ++i) arena()[static_cast<size_t>(i)] = byte_at(i);
  const auto file = open("a", OpenMode::kCreate);
  {
    const auto queue = make_queue(16);
    std::vector<IoRequest> writes;
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t begin = i * (kArena / 16);
      writes.push_back(write(file.get(), begin, slice(arena(), begin, kArena / 16)));
    }
    queue->submit(writes);
  }
  std::ranges::fill(arena(), std::byte{0});  // Would reach the disk, were a write still under way.
  ASSERT_OK_AND_ASSIGN(const auto found, read_file(fs(), directory_.file("a")));
  ASSERT_EQ(ssize(found), kArena);
  for (int64_t i = 0; i < kArena; ++i) ASSERT_EQ(found[static_cast<size_t>(i)], byte_at(i)) << i;
}

// As a process at its limit of threads.
TEST_P(IoQueueTest, AQueueWithoutThreadsOfItsOwnReadsAllTheSame) {
  const auto file = filled("a", 4 * kBlock);
  const auto queue = [&] {
    const NoThreads no_threads;
    return make_queue(4);
  }();
  for (int i = 0; i < 4; ++i) {
    const IoRequest one = read(file.get(), i * kBlock, slice(arena(), i * kBlock, kBlock));
    queue->submit({&one, 1});
  }
  while (queue->in_flight() > 0) {
    for (const IoDone& done : queue->wait()) EXPECT_OK(done.status);
  }
  for (int64_t i = 0; i < 4 * kBlock; ++i) ASSERT_EQ(arena()[static_cast<size_t>(i)], byte_at(i));
  const bool says_so = queue->mode().reason.find("only 0 threads") != std::string::npos;
  EXPECT_EQ(says_so, queue->mode().name != "io_uring") << queue->mode().reason;
}

// A disk in memory; some kernels refuse O_DIRECT there and some do not.
TEST_P(IoQueueTest, WorksOnTmpfs) {
  if (!writes_at_offsets()) GTEST_SKIP() << "no file of the system";
  const TempDirectory in_memory("/dev/shm");
  if (in_memory.path().empty()) GTEST_SKIP() << "there is no /dev/shm";
  ASSERT_OK_AND_ASSIGN(const auto file,
                       disk_.open(in_memory.file("a"), OpenMode::kCreate, caching()));
  EXPECT_EQ(file->fallback_reason().empty(),
            caching() == Caching::kBuffered || file->alignment() > 1);
  const auto queue = make_queue(1);
  std::ranges::fill(arena(), std::byte{0x5A});
  ASSERT_OK(run(*queue, write(file.get(), 0, slice(arena(), 0, 8 * kBlock))));
  std::ranges::fill(arena(), std::byte{0});
  ASSERT_OK(run(*queue, read(file.get(), kBlock, slice(arena(), 0, kBlock))));
  EXPECT_EQ(arena()[77], std::byte{0x5A});
  EXPECT_OK(run(*queue, sync(file.get())));
}

// A direct file whose file system refuses O_DIRECT takes the same requests, through the cache. The
// files of /proc are such, on every kernel.
TEST_P(IoQueueTest, ReadsAFileThatFellBackToBuffered) {
  if (!writes_at_offsets()) GTEST_SKIP() << "no file of the system";
  ASSERT_OK_AND_ASSIGN(const auto file, disk_.open("/proc/version", OpenMode::kRead, caching()));
  ASSERT_EQ(file->alignment(), 1);
  const auto queue = make_queue(1);
  ASSERT_OK(run(*queue, read(file.get(), 0, slice(arena(), 3, 5))));
  EXPECT_EQ(as_text(slice(arena(), 3, 5)), "Linux");
}

}  // namespace
}  // namespace torch_ckpt::io_queue_test
