#pragma once

// Whether there is a CPU for a thread whenever it wants one.

#include <chrono>

namespace torch_ckpt {

struct CpuTime {
  std::chrono::nanoseconds ran{};     // On a CPU.
  std::chrono::nanoseconds waited{};  // For one, while others had it.
};

// That of the calling thread since it was last asked for, or since the thread began. Nothing where
// the kernel does not tell.
CpuTime take_cpu_time();

}  // namespace torch_ckpt
