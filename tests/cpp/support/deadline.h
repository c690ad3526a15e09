#pragma once

// Limits on the time and the threads of a test.

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace torch_ckpt {

// Ends the program if a test is not over in time: a deadlock must not stop the suite in silence.
class Deadline {
 public:
  explicit Deadline(int seconds = 300) : thread_([this, seconds] { watch(seconds); }) {}
  ~Deadline() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  void watch(int seconds) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::seconds(seconds), [&] { return is_over_; })) return;
    std::fprintf(stderr, "the test is not over after %d s: a deadlock\n", seconds);
    std::abort();
  }

  std::mutex mutex_;  // Guards the members below.
  std::condition_variable changed_;
  bool is_over_ = false;
  std::thread thread_;
};

// While it lives, no thread can be started in this process: its stack would be too long.
class NoThreads {
 public:
  NoThreads() {
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t attributes;
    ::pthread_getattr_default_np(&attributes);
    ::pthread_attr_setstacksize(&attributes, size_t{1} << 47);
    ::pthread_setattr_default_np(&attributes);
    ::pthread_attr_destroy(&attributes);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace torch_ckpt
