#pragma once

// IoCounts: how many requests a job made, and how long it did nothing but wait for them.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>

#include "io/file_system.h"

namespace torch_ckpt {

// The threads of a job count together. Any thread may read.
class IoCounts {
 public:
  void submit(IoQueue& queue, const IoRequest& request) {
    requests_.fetch_add(1, std::memory_order_relaxed);
    queue.submit({&request, 1});
  }

  // Waits as `IoQueue::wait` does.
  std::span<const IoDone> wait(IoQueue& queue) {
    const auto begin = std::chrono::steady_clock::now();
    const std::span<const IoDone> done = queue.wait();
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
    waited_ns_.fetch_add(waited.count(), std::memory_order_relaxed);
    return done;
  }

  int64_t requests() const { return requests_.load(std::memory_order_relaxed); }
  // Seconds of all threads together.
  double waited_s() const {
    return static_cast<double>(waited_ns_.load(std::memory_order_relaxed)) * 1e-9;
  }

 private:
  std::atomic<int64_t> requests_ = 0;
  std::atomic<int64_t> waited_ns_ = 0;
};

}  // namespace torch_ckpt
