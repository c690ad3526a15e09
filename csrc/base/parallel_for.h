#pragma once

// A parallel loop.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace torch_ckpt {

// Calls `work(i)` for every i in [0, count) on up to `threads` threads, including the calling one.
// Returns when all calls have returned.
// Requires: `work` does not throw.
template <typename Work>
void parallel_for(int64_t count, int threads, const Work& work) {
  std::atomic<int64_t> next = 0;
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  const int64_t thread_count = std::min<int64_t>(threads, count);
  try {
    for (int64_t i = 1; i < thread_count; ++i) others.emplace_back(run);
  } catch (const std::system_error&) {
    // The process cannot start more threads: the running ones do all the work.
  }
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace torch_ckpt
