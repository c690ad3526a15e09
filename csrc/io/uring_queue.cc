#include "io/uring_queue.h"

#if TORCH_CKPT_HAVE_URING

#include <liburing.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "io/transfer.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kMaxRegisteredBuffer = int64_t{1} << 30;  // Kernel limit.
constexpr int kMaxDepth = 32768;                            // Kernel limit.
constexpr int kMaxSubmitRetries = 10000;

// Time without a completion before a wake-up is submitted. The time doubles after each one.
constexpr int64_t kFirstPollMs = 100;
constexpr int64_t kMaxPollMs = 10'000;
constexpr uint64_t kWakeUpTag = ~uint64_t{0} >> 1;  // `user_data` of a wake-up.

class UringQueue final : public IoQueue {
 public:
  UringQueue() {
    mode_.name = "io_uring";
    mode_.reason = "no buffers are registered";
  }

  ~UringQueue() override {
    if (!ring_ready_) return;
    while (in_flight_ > 0) wait();
    // Unregister explicitly: the kernel closes the ring asynchronously, and the next queue needs
    // the locked memory limit at once.
    if (mode_.registered) ::io_uring_unregister_buffers(&ring_);
    ::io_uring_queue_exit(&ring_);
  }

  Status open(int depth);
  void register_memory(MutableBytes memory) override;

  const QueueMode& mode() const override { return mode_; }
  int room() const override { return std::max(depth_ - in_flight_, 0); }
  int in_flight() const override { return in_flight_; }
  void submit(std::span<const IoRequest> requests) override;
  std::span<const IoDone> wait() override;

 private:
  void finish(uint64_t tag, Status status) { finished_.push_back({tag, std::move(status)}); }
  void finish_slot(uint32_t slot, Status status) {
    finish(transfers_[slot].tag(), std::move(status));
    free_slots_.push_back(slot);
  }
  void queue_step(uint32_t slot);
  void flush();
  void fail_unsubmitted(int error);
  void wait_for_kernel(int64_t* poll_ms);
  void submit_wake_up();
  void reap();
  int registered_index(const Transfer::Step& step) const;

  io_uring ring_ = {};
  bool ring_ready_ = false;
  int depth_ = 0;
  QueueMode mode_;
  bool was_told_memory_ = false;  // `register_memory` had memory.
  std::vector<iovec> registered_;

  int in_flight_ = 0;                // Requests that `wait` has not returned yet.
  std::vector<Transfer> transfers_;  // Indexed by slot, the `user_data` of the requests.
  std::vector<uint32_t> free_slots_;
  std::vector<IoDone> finished_;  // Completions not yet returned.
  std::vector<IoDone> done_;      // Completions of the last `wait`.
};

Status UringQueue::open(int depth) {
  depth_ = std::clamp(depth, 1, kMaxDepth);
  // No single-issuer flag: one thread makes a job and another runs it.
  io_uring_params params = {};
  params.flags = IORING_SETUP_CLAMP;
  int rc = ::io_uring_queue_init_params(static_cast<unsigned>(depth_), &ring_, &params);
  if (rc == -EINVAL) {  // Kernels before 5.6.
    params = {};
    rc = ::io_uring_queue_init_params(static_cast<unsigned>(depth_), &ring_, &params);
  }
  if (rc < 0) return unsupported(errno_status(-rc, "io_uring is refused").message());
  ring_ready_ = true;

  io_uring_probe* probe = ::io_uring_get_probe_ring(&ring_);
  const bool usable = probe != nullptr && ::io_uring_opcode_supported(probe, IORING_OP_READ) &&
                      ::io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                      ::io_uring_opcode_supported(probe, IORING_OP_FSYNC);
  ::io_uring_free_probe(probe);
  if (!usable) return unsupported("the io_uring of this kernel lacks plain reads and writes");

  depth_ = std::min(depth_, static_cast<int>(params.sq_entries));
  transfers_.resize(static_cast<size_t>(depth_));
  for (int slot = depth_; slot-- > 0;) free_slots_.push_back(static_cast<uint32_t>(slot));
  return ok_status();
}

void UringQueue::register_memory(MutableBytes memory) {
  if (memory.empty() || was_told_memory_) return;
  was_told_memory_ = true;
  for (int64_t at = 0; at < ssize(memory); at += kMaxRegisteredBuffer) {
    const MutableBytes chunk =
        slice(memory, at, std::min(kMaxRegisteredBuffer, ssize(memory) - at));
    registered_.push_back({chunk.data(), chunk.size()});
  }
  const int rc = ::io_uring_register_buffers(&ring_, registered_.data(),
                                             static_cast<unsigned>(registered_.size()));
  mode_.registered = rc == 0;
  mode_.reason.clear();
  if (rc == 0) return;
  registered_.clear();
  mode_.reason =
      errno_status(-rc, str_cat("cannot register ", memory.size(), " bytes of buffers")).message();
}

// Returns the registered buffer that contains the whole step, or -1.
int UringQueue::registered_index(const Transfer::Step& step) const {
  const auto begin = reinterpret_cast<uintptr_t>(step.data);
  for (size_t i = 0; i < registered_.size(); ++i) {
    const auto base = reinterpret_cast<uintptr_t>(registered_[i].iov_base);
    if (begin >= base && begin - base <= registered_[i].iov_len &&
        step.nbytes <= registered_[i].iov_len - (begin - base)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void UringQueue::submit(std::span<const IoRequest> requests) {
  for (const IoRequest& request : requests) {
    ++in_flight_;
    if (free_slots_.empty()) {
      finish(request.tag, internal_error("more requests than the queue accepts"));
      continue;
    }
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    transfers_[slot] = Transfer(request);
    if (auto status = transfers_[slot].finished_at_once()) {
      finish_slot(slot, *std::move(status));
    } else {
      queue_step(slot);
    }
  }
  flush();
}

void UringQueue::queue_step(uint32_t slot) {
  io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
  if (sqe == nullptr) {
    // Unreachable: there are as many ring entries as slots, and `flush` submits all of them.
    finish_slot(slot, internal_error(transfers_[slot].failure(), ": the submission ring is full"));
    return;
  }
  const Transfer::Step step = transfers_[slot].next();
  const auto offset = static_cast<uint64_t>(step.offset);
  const int buffer = registered_index(step);
  switch (step.kind) {
    case IoRequest::Kind::kRead:
      if (buffer >= 0) {
        ::io_uring_prep_read_fixed(sqe, step.fd, step.data, step.nbytes, offset, buffer);
      } else {
        ::io_uring_prep_read(sqe, step.fd, step.data, step.nbytes, offset);
      }
      break;
    case IoRequest::Kind::kWrite:
      if (buffer >= 0) {
        ::io_uring_prep_write_fixed(sqe, step.fd, step.data, step.nbytes, offset, buffer);
      } else {
        ::io_uring_prep_write(sqe, step.fd, step.data, step.nbytes, offset);
      }
      break;
    case IoRequest::Kind::kSync:
      ::io_uring_prep_fsync(sqe, step.fd, 0);
      break;
  }
  ::io_uring_sqe_set_data64(sqe, slot);
}

// Submits every prepared entry. The kernel may accept them in several batches.
void UringQueue::flush() {
  for (int retries = 0; ::io_uring_sq_ready(&ring_) > 0;) {
    const int submitted = ::io_uring_submit(&ring_);
    if (submitted > 0) {
      retries = 0;
      continue;
    }
    const bool transient =
        submitted == 0 || submitted == -EINTR || submitted == -EAGAIN || submitted == -EBUSY;
    if (!transient || ++retries >= kMaxSubmitRetries) {
      fail_unsubmitted(submitted == 0 ? EAGAIN : -submitted);
      return;
    }
    ::sched_yield();
  }
}

// Removes and fails the entries that the kernel did not accept, so that they do not stay in flight.
void UringQueue::fail_unsubmitted(int error) {
  const unsigned head = *ring_.sq.khead;  // The kernel advances the head only within a submission.
  const unsigned tail = ring_.sq.sqe_tail;
  for (unsigned at = head; at != tail; ++at) {
    const uint64_t data = ring_.sq.sqes[at & *ring_.sq.kring_mask].user_data;
    if (data >= transfers_.size()) continue;  // Not a request: a wake-up, or liburing's own entry.
    const auto slot = static_cast<uint32_t>(data);
    finish_slot(slot, errno_status(error, transfers_[slot].failure()));
  }
  ring_.sq.sqe_head = ring_.sq.sqe_tail = head;
  io_uring_smp_store_release(ring_.sq.ktail, head);
}

// Processes every completion that has arrived. Resubmits short transfers.
void UringQueue::reap() {
  io_uring_cqe* cqe = nullptr;
  while (::io_uring_peek_cqe(&ring_, &cqe) == 0) {
    const uint64_t data = ::io_uring_cqe_get_data64(cqe);
    const int result = cqe->res;
    ::io_uring_cqe_seen(&ring_, cqe);
    if (data >= transfers_.size()) continue;  // Not a request.
    const auto slot = static_cast<uint32_t>(data);
    if (auto status = transfers_[slot].advance(result)) {
      finish_slot(slot, *std::move(status));
    } else {
      queue_step(slot);
    }
  }
  flush();
}

void UringQueue::wait_for_kernel(int64_t* poll_ms) {
  io_uring_cqe* cqe = nullptr;
  __kernel_timespec timeout = {*poll_ms / 1000, *poll_ms % 1000 * 1'000'000};
  const int rc = ::io_uring_wait_cqe_timeout(&ring_, &cqe, &timeout);
  if (rc == -ETIME) {
    submit_wake_up();
    *poll_ms = std::min(2 * *poll_ms, kMaxPollMs);
  } else if (rc < 0) {
    // Waiting failed, but the kernel may still write to the memory of in-flight requests: poll
    // until they are complete.
    ::sched_yield();
  }
}

// Works around a lost io_uring wake-up: Linux 6.18 can queue a buffered write to its worker threads
// without waking one. Any new work wakes a worker, which then finds all queued work.
void UringQueue::submit_wake_up() {
  io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
  if (sqe == nullptr) return;
  ::io_uring_prep_nop(sqe);
  ::io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
  ::io_uring_sqe_set_data64(sqe, kWakeUpTag);
  flush();
}

std::span<const IoDone> UringQueue::wait() {
  done_.clear();
  if (in_flight_ == 0) return done_;
  int64_t poll_ms = kFirstPollMs;
  for (reap(); finished_.empty(); reap()) wait_for_kernel(&poll_ms);
  done_.swap(finished_);
  in_flight_ -= static_cast<int>(done_.size());
  return done_;
}

}  // namespace

Result<std::unique_ptr<IoQueue>> make_uring_queue(int depth) {
  auto queue = std::make_unique<UringQueue>();
  RETURN_IF_ERROR(queue->open(depth));
  return std::unique_ptr<IoQueue>(std::move(queue));
}

}  // namespace torch_ckpt

#endif  // TORCH_CKPT_HAVE_URING
