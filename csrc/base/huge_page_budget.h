#pragma once

// HugePageBudget: decides whether to continue to use huge pages while memory is populated.
//
// Huge pages usually take half the time of small ones. But if memory is fragmented, the kernel
// moves other pages to form huge ones, which takes ten times as long. So the budget compares the
// time of huge pages with the measured time of small pages, and is spent when huge pages have cost
// too much.
//
// Memory::populate uses one budget for all its threads.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace torch_ckpt {

// Used by several threads at a time.
class HugePageBudget {
 public:
  // Total extra time that huge pages may cost, compared to small ones. A save or load of a gigabyte
  // gains more than this from huge pages.
  static constexpr std::chrono::nanoseconds kMaxExcess = std::chrono::milliseconds(32);

  // `small_time` is the time to populate `nbytes` with small pages.
  HugePageBudget(std::chrono::nanoseconds small_time, int64_t nbytes)
      : small_ns_per_byte_(static_cast<double>(small_time.count()) / static_cast<double>(nbytes)) {}

  // Adds the time to populate `nbytes` with huge pages.
  void add(std::chrono::nanoseconds huge_time, int64_t nbytes) {
    const double excess =
        static_cast<double>(huge_time.count()) - small_ns_per_byte_ * static_cast<double>(nbytes);
    const std::lock_guard lock(mutex_);
    excess_ns_ = std::max(excess_ns_ + excess, 0.0);
    if (excess_ns_ > static_cast<double>(kMaxExcess.count())) is_spent_ = true;
  }

  // Whether to use small pages from now on. Once true, it stays true.
  bool is_spent() const {
    const std::lock_guard lock(mutex_);
    return is_spent_;
  }

 private:
  const double small_ns_per_byte_;
  mutable std::mutex mutex_;
  double excess_ns_ = 0;
  bool is_spent_ = false;
};

}  // namespace torch_ckpt
