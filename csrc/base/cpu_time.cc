#include "base/cpu_time.h"

#include <cstdint>
#include <fstream>
#include <optional>
#include <utility>

namespace torch_ckpt {
namespace {

// All of it since the thread began.
std::optional<CpuTime> cpu_time() {
  // "RAN WAITED SLICES", in nanoseconds (Documentation/scheduler/sched-stats.rst of Linux).
  std::ifstream file("/proc/thread-self/schedstat");
  int64_t ran = 0;
  int64_t waited = 0;
  if (!(file >> ran >> waited)) return std::nullopt;
  return CpuTime{std::chrono::nanoseconds(ran), std::chrono::nanoseconds(waited)};
}

}  // namespace

CpuTime take_cpu_time() {
  thread_local CpuTime taken;
  const std::optional<CpuTime> all = cpu_time();
  if (!all) return {};
  const CpuTime before = std::exchange(taken, *all);
  return {all->ran - before.ran, all->waited - before.waited};
}

}  // namespace torch_ckpt
