// Whole saves and loads on a real disk whose every system call may be interrupted, refused for now
// or cut short. transfer_test.cc has the single steps.

#include <gtest/gtest.h>

#include <cerrno>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/load/load_job.h"
#include "io/posix_file_system.h"
#include "io/transfer.h"
#include "support/read_file.h"
#include "support/saved_checkpoint.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"
#include "support/test_tensor.h"

namespace torch_ckpt::interrupted_io_test {
namespace {

// What has been done to the transfers.
struct Interruptions {
  int64_t cut_short = 0;
  int64_t between_boundaries = 0;  // Cut short where no direct transfer can go on.
  int64_t refused = 0;
};

// Carries requests out one at a time, in a random order.
class InterruptedQueue : public IoQueue {
 public:
  InterruptedQueue(int depth, uint32_t seed, Interruptions& counts)
      : depth_(depth), random_(seed), counts_(counts) {}
  ~InterruptedQueue() override {
    while (in_flight() > 0) (void)wait();
  }

  const QueueMode& mode() const override { return mode_; }
  int room() const override { return depth_ - in_flight(); }
  int in_flight() const override { return static_cast<int>(pending_.size()); }
  void submit(std::span<const IoRequest> requests) override {
    pending_.insert(pending_.end(), requests.begin(), requests.end());
  }

  std::span<const IoDone> wait() override {
    std::swap(pending_[random_() % pending_.size()], pending_.back());
    const IoRequest request = pending_.back();
    pending_.pop_back();
    Transfer transfer(request);
    std::optional<Status> status = transfer.finished_at_once();
    const int buffered_fd = static_cast<PosixFile&>(*request.file).buffered_fd();
    while (!status) status = transfer.advance(perform_badly(transfer.next(), buffered_fd));
    done_ = {{request.tag, *std::move(status)}};
    return done_;
  }

 private:
  // What a step returns. Bytes that it does not report have not been moved.
  int64_t perform_badly(Transfer::Step step, int buffered_fd) {
    const uint32_t fate = random_() % 8;
    if (step.kind == IoRequest::Kind::kSync || fate == 0 || step.nbytes < 2) return perform(step);
    if (fate < 4) {
      ++counts_.refused;
      return fate == 1 ? -EAGAIN : -EINTR;
    }
    const int64_t grain = fate < 6 ? PosixFile::kDirectAlignment : 1;
    const int64_t part = align_down(1 + random_() % (step.nbytes - 1), grain);
    if (part == 0) return perform(step);
    ++counts_.cut_short;
    return perform_first(step, part, buffered_fd);
  }

  // O_DIRECT takes whole blocks only: the odd bytes of a part go through the page cache.
  int64_t perform_first(Transfer::Step step, int64_t part, int buffered_fd) {
    const bool is_direct = step.fd != buffered_fd;
    const int64_t first = is_direct ? align_down(part, PosixFile::kDirectAlignment) : part;
    if (is_direct && first < part) ++counts_.between_boundaries;
    step.nbytes = static_cast<uint32_t>(first);
    const int64_t moved = first > 0 ? perform(step) : 0;
    if (moved < first || first == part) return moved;
    step.fd = buffered_fd;
    step.data += first;
    step.offset += first;
    step.nbytes = static_cast<uint32_t>(part - first);
    const int64_t odd = perform(step);
    return odd < 0 ? odd : first + odd;
  }

  const int depth_;
  const QueueMode mode_ = {.name = "interrupted", .registered = false, .reason = "a test"};
  std::mt19937 random_;
  Interruptions& counts_;
  std::vector<IoRequest> pending_;
  std::vector<IoDone> done_;
};

class InterruptedFileSystem : public PosixFileSystem {
 public:
  explicit InterruptedFileSystem(uint32_t seed) : seed_(seed) {}

  std::unique_ptr<IoQueue> make_queue(int depth) override {
    return std::make_unique<InterruptedQueue>(depth, seed_++, counts);
  }

  Interruptions counts;

 private:
  uint32_t seed_;
};

TEST(InterruptedIoTest, SavesAndLoadsMoveTheSameBytes) {
  const auto matrix = TestTensor::random("matrix", DType::kFloat32, {130, 210}, 1);
  const std::vector<TestTensor> saved = {matrix, matrix.transposed(0, 1),
                                         TestTensor::random("scalar", DType::kFloat64, {}, 2),
                                         TestTensor::random("large", DType::kUInt8, {1200000}, 3)};
  const Layout layout = layout_of(saved);
  const auto pool = make_pool(128 << 10, 16 << 10);
  Interruptions counts;
  for (const Caching caching : {Caching::kDirect, Caching::kBuffered}) {
    for (uint32_t seed = 1; seed <= 5; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      TempDirectory directory;
      PosixFileSystem plain;
      InterruptedFileSystem fs(seed * 100);
      ASSERT_OK(save_tensors(plain, directory.file("a"), saved, *pool, {.caching = caching}));
      ASSERT_OK(save_tensors(fs, directory.file("b"), saved, *pool, {.caching = caching}));
      ASSERT_OK_AND_ASSIGN(const auto a, read_file(plain, directory.file("a")));
      ASSERT_OK_AND_ASSIGN(const auto b, read_file(fs, directory.file("b")));
      ASSERT_TRUE(a == b);

      std::vector<TestTensor> loaded;
      std::vector<TensorRequest> requests;
      for (size_t i = 0; i < saved.size(); ++i) {
        const LiveTensor& live = saved[i].live;
        loaded.push_back(TestTensor::random(live.name, live.dtype, live.sizes, 99));
        const Slice& slice = layout.slices[i];
        requests.push_back(
            whole({"b", slice.offset, slice.total_nbytes(), live.name}, loaded.back()));
      }
      // One thread: the queues share their counts.
      ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(fs, directory.path(),
                                                         {.buffer_nbytes = 192 << 10,
                                                          .block_nbytes = 32 << 10,
                                                          .threads = 1,
                                                          .caching = caching}));
      ASSERT_OK(job->run(requests, {}));
      for (size_t i = 0; i < saved.size(); ++i) {
        EXPECT_TRUE(loaded[i].packed() == saved[i].packed()) << saved[i].live.name;
      }
      counts.cut_short += fs.counts.cut_short;
      counts.refused += fs.counts.refused;
      counts.between_boundaries += fs.counts.between_boundaries;
    }
  }
  EXPECT_GT(counts.cut_short, 100);
  EXPECT_GT(counts.refused, 100);
  std::cout << counts.cut_short << " transfers cut short, " << counts.between_boundaries
            << " of them between boundaries of O_DIRECT; " << counts.refused << " refused\n";
}

}  // namespace
}  // namespace torch_ckpt::interrupted_io_test
