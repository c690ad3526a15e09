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

constexpr int64_t kMaxRegisteredBuffer = int64_t{1} << 30;  // The kernel's limit.
constexpr int kMaxDepth = 32768;                            // As well.
constexpr int kMaxSubmitRetries = 10000;

// How long the kernel may be silent before it is reminded: twice as long each time.
constexpr int64_t kFirstPollMs = 100;
constexpr int64_t kMaxPollMs = 10'000;
constexpr uint64_t kReminder = ~uint64_t{0} >> 1;  // `user_data` of what is no request.

class UringQueue final : public IoQueue {
 public:
  UringQueue() { mode_.name = "io_uring"; }

  ~UringQueue() override {
    if (!ring_ready_) return;
    while (in_flight_ > 0) wait();
    // Here rather than left to the closing of the ring, which the kernel puts off: the limit on
    // locked memory is given back before the next queue asks for it.
    if (mode_.registered) ::io_uring_unregister_buffers(&ring_);
    ::io_uring_queue_exit(&ring_);
  }

  Status open(int depth);
  void register_memory(MutableBytes memory);

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
  void remind();
  void reap();
  int registered_index(const Transfer::Step& step) const;

  io_uring ring_ = {};
  bool ring_ready_ = false;
  int depth_ = 0;
  QueueMode mode_;
  std::vector<iovec> registered_;

  int in_flight_ = 0;                // Submitted, and not yet returned by `wait`.
  std::vector<Transfer> transfers_;  // By slot, which is the `user_data` of its requests.
  std::vector<uint32_t> free_slots_;
  std::vector<IoDone> finished_;  // Not yet returned.
  std::vector<IoDone> done_;      // What `wait` returned last.
};

Status UringQueue::open(int depth) {
  depth_ = std::clamp(depth, 1, kMaxDepth);
  // No flag ties the ring to the thread that made it: jobs are made on one and run on another.
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
  if (memory.empty()) {
    mode_.reason = "no memory was named to register";
    return;
  }
  for (int64_t at = 0; at < ssize(memory); at += kMaxRegisteredBuffer) {
    const MutableBytes part = slice(memory, at, std::min(kMaxRegisteredBuffer, ssize(memory) - at));
    registered_.push_back({part.data(), part.size()});
  }
  const int rc = ::io_uring_register_buffers(&ring_, registered_.data(),
                                             static_cast<unsigned>(registered_.size()));
  mode_.registered = rc == 0;
  if (rc == 0) return;
  registered_.clear();
  mode_.reason =
      errno_status(-rc, str_cat("cannot register ", memory.size(), " bytes of buffers")).message();
}

// The registered buffer that holds all of the step, or -1.
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
      finish(request.tag, internal_error("more requests than the queue holds"));
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
    // There are as many entries as slots, and `flush` leaves none of them taken.
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

// Hands every prepared entry to the kernel, which may take them in parts.
void UringQueue::flush() {
  for (int retries = 0; ::io_uring_sq_ready(&ring_) > 0;) {
    const int taken = ::io_uring_submit(&ring_);
    if (taken > 0) {
      retries = 0;
      continue;
    }
    const bool passing = taken == 0 || taken == -EINTR || taken == -EAGAIN || taken == -EBUSY;
    if (!passing || ++retries >= kMaxSubmitRetries) {
      fail_unsubmitted(taken == 0 ? EAGAIN : -taken);
      return;
    }
    ::sched_yield();
  }
}

// Takes back the entries that the kernel has not: without this they would count as in flight for
// ever.
void UringQueue::fail_unsubmitted(int error) {
  const unsigned head = *ring_.sq.khead;  // Moved by the kernel only within a submission.
  const unsigned tail = ring_.sq.sqe_tail;
  for (unsigned at = head; at != tail; ++at) {
    const uint64_t data = ring_.sq.sqes[at & *ring_.sq.kring_mask].user_data;
    if (data >= transfers_.size()) continue;  // No request: a reminder, or liburing's own.
    const auto slot = static_cast<uint32_t>(data);
    finish_slot(slot, errno_status(error, transfers_[slot].failure()));
  }
  ring_.sq.sqe_head = ring_.sq.sqe_tail = head;
  io_uring_smp_store_release(ring_.sq.ktail, head);
}

// Takes every completion that has arrived; what was short goes back to the kernel.
void UringQueue::reap() {
  io_uring_cqe* cqe = nullptr;
  while (::io_uring_peek_cqe(&ring_, &cqe) == 0) {
    const uint64_t data = ::io_uring_cqe_get_data64(cqe);
    const int result = cqe->res;
    ::io_uring_cqe_seen(&ring_, cqe);
    if (data >= transfers_.size()) continue;  // No request.
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
    remind();
    *poll_ms = std::min(2 * *poll_ms, kMaxPollMs);
  } else if (rc < 0) {
    // Whatever may be wrong with waiting, the kernel still writes to the memory of these requests,
    // so they are not over: look until they are.
    ::sched_yield();
  }
}

// Linux 6.18 has been seen to leave a buffered write to its workers and to wake none, for ever.
// Work of any kind wakes one, which then finds all that is there.
void UringQueue::remind() {
  io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
  if (sqe == nullptr) return;
  ::io_uring_prep_nop(sqe);
  ::io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
  ::io_uring_sqe_set_data64(sqe, kReminder);
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

Result<std::unique_ptr<IoQueue>> make_uring_queue(int depth, MutableBytes registered) {
  auto queue = std::make_unique<UringQueue>();
  RETURN_IF_ERROR(queue->open(depth));
  queue->register_memory(registered);
  return std::unique_ptr<IoQueue>(std::move(queue));
}

}  // namespace torch_ckpt

#endif  // TORCH_CKPT_HAVE_URING
