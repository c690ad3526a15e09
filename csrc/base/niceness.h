#pragma once

// Work that steps back behind whatever else wants the CPU.

#include <sys/resource.h>
#include <unistd.h>

#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace torch_ckpt {

// Runs `work`, which does not throw, and returns what it returns: in a thread that steps back by
// `niceness`, as nice(1) has it. The caller's own could not come forward again. Where that is 0, or
// no thread is to be had, it is the caller's.
template <typename Work>
auto run_at_niceness(int niceness, Work&& work) -> decltype(work()) {
  if (niceness == 0) return std::forward<Work>(work)();
  std::optional<decltype(work())> result;
  try {
    std::thread([&] {
      // Of this thread alone, on Linux.
      ::setpriority(PRIO_PROCESS, 0, ::getpriority(PRIO_PROCESS, 0) + niceness);
      result.emplace(work());
    }).join();
  } catch (const std::system_error&) {
    result.emplace(work());
  }
  return *std::move(result);
}

}  // namespace torch_ckpt
