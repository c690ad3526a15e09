#pragma once

// IoCounts: how far a job is, how many requests it made, and how long it did nothing but wait for
// them.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "io/file_system.h"
#include "io/storage_call.h"

namespace torch_ckpt {

// The threads of a job count together. Any thread may read.
class IoCounts {
 public:
  void submit(IoQueue& queue, const IoRequest& request) {
    const StorageCall call(doing(request.kind), request.file->path(), this);
    requests_.fetch_add(1, std::memory_order_relaxed);
    queue.submit({&request, 1});
  }

  // Waits as `IoQueue::wait` does. A request of this kind to the file at `path` is in flight.
  std::span<const IoDone> wait(IoQueue& queue, IoRequest::Kind kind, const std::string& path) {
    const StorageCall call(doing(kind), path, this);
    const auto begin = std::chrono::steady_clock::now();
    const std::span<const IoDone> done = queue.wait();
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
    waited_ns_.fetch_add(waited.count(), std::memory_order_relaxed);
    return done;
  }

  // Adds bytes that the job will read or write, and those that it has.
  void expect(int64_t nbytes) { total_nbytes_.fetch_add(nbytes, std::memory_order_relaxed); }
  void add_done(int64_t nbytes) { done_nbytes_.fetch_add(nbytes, std::memory_order_relaxed); }

  int64_t requests() const { return requests_.load(std::memory_order_relaxed); }
  int64_t done_nbytes() const { return done_nbytes_.load(std::memory_order_relaxed); }
  int64_t total_nbytes() const { return total_nbytes_.load(std::memory_order_relaxed); }
  // Seconds of all threads together.
  double waited_s() const {
    return static_cast<double>(waited_ns_.load(std::memory_order_relaxed)) * 1e-9;
  }

 private:
  static const char* doing(IoRequest::Kind kind) {
    switch (kind) {
      case IoRequest::Kind::kRead:
        return "reading";
      case IoRequest::Kind::kWrite:
        return "writing";
      case IoRequest::Kind::kSync:
        return "syncing";
    }
    return "using";
  }

  std::atomic<int64_t> requests_ = 0;
  std::atomic<int64_t> done_nbytes_ = 0;
  std::atomic<int64_t> total_nbytes_ = 0;
  std::atomic<int64_t> waited_ns_ = 0;
};

}  // namespace torch_ckpt
