#pragma once

// A loop whose iterations run in several threads.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace torch_ckpt {

// Calls `work(i)` for every i in [0, count), by this thread and others, `threads` in all where
// there can be as many. Returns when all is done. `work` does not throw.
template <typename Work>
void parallel_for(int64_t count, int threads, const Work& work) {
  std::atomic<int64_t> next = 0;
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  const int64_t most = std::min<int64_t>(threads, count);
  try {
    for (int64_t i = 1; i < most; ++i) others.emplace_back(run);
  } catch (const std::system_error&) {
    // No more threads to be had: those that run do all the work.
  }
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace torch_ckpt
