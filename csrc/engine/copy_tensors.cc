#include "engine/copy_tensors.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "geometry/box.h"

namespace torch_ckpt {
namespace {

// What a thread takes at a time: long enough to run at the speed of memory, short enough to share.
constexpr int64_t kPartNbytes = int64_t{4} << 20;

struct Part {
  const PackedCopy* copy;
  int64_t begin;  // Elements.
  int64_t end;
};

std::vector<Part> cut(std::span<const PackedCopy> copies) {
  std::vector<Part> parts;
  for (const PackedCopy& copy : copies) {
    const int64_t numel = checked_numel(copy.tensor.sizes).value_or(0);
    const int64_t most = std::max<int64_t>(1, kPartNbytes / itemsize(copy.tensor.dtype));
    for (int64_t begin = 0; begin < numel; begin += most) {
      parts.push_back({&copy, begin, std::min(begin + most, numel)});
    }
  }
  return parts;
}

}  // namespace

Status copy_tensors(std::span<const PackedCopy> copies, int threads) {
  const std::vector<Part> parts = cut(copies);
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  Status first;
  const auto run = [&] {
    for (size_t i = next++; i < parts.size(); i = next++) {
      const auto& [copy, begin, end] = parts[i];
      const int64_t size = itemsize(copy->tensor.dtype);
      const MutableBytes out(copy->to + begin * size, static_cast<size_t>((end - begin) * size));
      const Status status = pack_elements(copy->tensor, begin, end, out);
      if (status.ok()) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (first.ok()) first = status;
    }
  };
  std::vector<std::thread> others;
  try {
    const auto useful = std::min(static_cast<size_t>(threads), parts.size());
    while (others.size() + 1 < useful) others.emplace_back(run);
  } catch (const std::system_error&) {
    // No more threads to be had: those that run do all the work.
  }
  run();
  for (std::thread& other : others) other.join();
  return first;
}

}  // namespace torch_ckpt
