#include "io/thread_queue.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/blocked_signals.h"
#include "io/transfer.h"

namespace torch_ckpt {
namespace {

constexpr int kMaxThreads = 8;  // More threads gain nothing on one disk.

Status call_system(const IoRequest& request, int /*in_flight*/) {
  Transfer transfer(request);
  std::optional<Status> status = transfer.finished_at_once();
  while (!status) status = transfer.advance(perform(transfer.next()));
  return *std::move(status);
}

class ThreadQueue : public IoQueue {
 public:
  ThreadQueue(int depth, int max_threads, QueueMode mode, CarryOut carry_out)
      : depth_(std::max(depth, 1)), mode_(std::move(mode)), carry_out_(std::move(carry_out)) {
    start_threads(std::min(depth_, max_threads));
  }

  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    // Requests remain only if no thread could be started.
    for (const IoRequest& request : waiting_) (void)carry_out(request);
  }

  const QueueMode& mode() const override { return mode_; }
  int room() const override { return std::max(depth_ - in_flight_, 0); }
  int in_flight() const override { return in_flight_; }

  void submit(std::span<const IoRequest> requests) override {
    {
      const std::lock_guard lock(mutex_);
      for (const IoRequest& request : requests) {
        if (in_flight_ < depth_) {
          waiting_.push_back(request);
        } else {
          finished_.push_back(
              {request.tag, internal_error("more requests than the queue accepts")});
        }
        ++in_flight_;
      }
    }
    work_.notify_all();
  }

  std::span<const IoDone> wait() override {
    done_.clear();
    if (in_flight_ == 0) return done_;
    std::unique_lock lock(mutex_);
    if (threads_.empty() && finished_.empty()) {
      const IoRequest& request = waiting_.front();
      finished_.push_back({request.tag, carry_out(request)});
      waiting_.pop_front();
    }
    news_.wait(lock, [&] { return !finished_.empty(); });
    done_.swap(finished_);
    in_flight_ -= static_cast<int>(done_.size());
    return done_;
  }

 private:
  void start_threads(int count) {
    const BlockedSignals blocked;
    try {
      for (int i = 0; i < count; ++i) {
        threads_.emplace_back([this] { serve(); });
      }
    } catch (const std::system_error&) {
      // The process is at its thread limit. Fewer threads do the same work; without any, `wait`
      // does it.
      mode_.reason += str_cat("; only ", threads_.size(), " threads could be started");
    }
  }

  Status carry_out(const IoRequest& request) const {
    return carry_out_(request, std::max(static_cast<int>(threads_.size()), 1));
  }

  // The main loop of one thread. Returns only if no request is waiting, so every request is
  // executed.
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const IoRequest request = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      IoDone done{request.tag, carry_out(request)};
      lock.lock();
      finished_.push_back(std::move(done));
      news_.notify_one();
    }
  }

  const int depth_;
  QueueMode mode_;
  const CarryOut carry_out_;

  // Used only by the owner of the queue.
  int in_flight_ = 0;
  std::vector<IoDone> done_;
  std::vector<std::thread> threads_;  // Complete before the first request.

  std::mutex mutex_;  // Guards the members below.
  std::condition_variable work_;
  std::condition_variable news_;
  std::deque<IoRequest> waiting_;
  std::vector<IoDone> finished_;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<IoQueue> make_thread_queue(int depth, int max_threads, QueueMode mode,
                                           CarryOut carry_out) {
  return std::make_unique<ThreadQueue>(depth, max_threads, std::move(mode), std::move(carry_out));
}

std::unique_ptr<IoQueue> make_thread_queue(int depth, std::string reason) {
  QueueMode mode = {.name = "threads", .reason = std::move(reason)};
  return make_thread_queue(depth, kMaxThreads, std::move(mode), call_system);
}

}  // namespace torch_ckpt
