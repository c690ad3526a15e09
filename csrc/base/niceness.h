#pragma once

// Background work at a lower CPU priority.

#include <sys/resource.h>
#include <unistd.h>

#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace torch_ckpt {

// Runs `work` at a niceness raised by `niceness` (see nice(1)) and returns its result. A separate
// thread runs `work`, because an unprivileged thread cannot lower its niceness again. If `niceness`
// is 0, or no thread can be started, the calling thread runs `work`.
// Requires: `work` does not throw.
template <typename Work>
auto run_at_niceness(int niceness, Work&& work) -> decltype(work()) {
  if (niceness == 0) return std::forward<Work>(work)();
  std::optional<decltype(work())> result;
  try {
    std::thread([&] {
      // On Linux, PRIO_PROCESS with id 0 affects only the calling thread.
      ::setpriority(PRIO_PROCESS, 0, ::getpriority(PRIO_PROCESS, 0) + niceness);
      result.emplace(work());
    }).join();
  } catch (const std::system_error&) {
    result.emplace(work());
  }
  return *std::move(result);
}

}  // namespace torch_ckpt
