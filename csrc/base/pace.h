#pragma once

// Work in the background of something else: how far it steps back, and rests while it does.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "base/cpu_time.h"

namespace torch_ckpt {

struct Background {
  int niceness = 0;  // As nice(1) has it (base/niceness.h).
  double share = 1;  // Most of the time that it is at work where CPUs are short. In (0, 1].
};

// While there is one, nothing in this process rests: somebody waits for what it does.
class Haste {
 public:
  Haste() { ++count_; }
  Haste(const Haste&) = delete;
  Haste& operator=(const Haste&) = delete;
  ~Haste() { --count_; }

  static bool is_on() { return count_ > 0; }

 private:
  static inline std::atomic<int> count_ = 0;
};

// Has a thread that must wait for a CPU, since others want it, rest between pieces of its work:
// even a thread of low priority that mostly waits for a disk costs others more than its own time on
// the CPU. Used by one thread at a time.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // Work begins now. Requires: 0 < share <= 1.
  explicit Pace(double share, Clock::time_point now = Clock::now()) : share_(share), since_(now) {}

  // To be called between pieces of work: rests for as long as those since the last rest demand.
  void rest() {
    if (share_ >= 1) return;
    const Clock::time_point now = Clock::now();
    if (now - since_ < kLook) return;
    const CpuTime had = take_cpu_time();
    // What a thread had before it came to this work does not count.
    const auto before = std::exchange(thread_, std::this_thread::get_id());
    const Clock::time_point end = now + rest_at(now, before == thread_ ? had : CpuTime());
    while (Clock::now() < end && !Haste::is_on()) {
      std::this_thread::sleep_until(std::min(end, Clock::now() + kNap));
    }
  }

  // The same for a clock that says this, and a thread that has had this since the last call:
  // returns how long to rest, and counts on that.
  Clock::duration rest_at(Clock::time_point now, CpuTime had) {
    using Seconds = std::chrono::duration<double>;
    // What takes longer waits for a disk, or was stopped.
    const Clock::duration worked =
        std::clamp<Clock::duration>(now - since_, Clock::duration::zero(), kLongestPiece);
    since_ = now;
    if (!is_cpu_short(had) || Haste::is_on()) return Clock::duration::zero();
    owed_ += std::chrono::duration_cast<Clock::duration>(Seconds(worked) * (1 / share_ - 1));
    const Clock::duration rest = std::min<Clock::duration>(owed_, kMost - rested_);
    if (rest < kShortest) return Clock::duration::zero();
    owed_ = Clock::duration::zero();
    since_ += rest;
    rested_ += rest;
    return rest;
  }

 private:
  // Where it has waited for half as long as it ran. Of late: what was long ago counts less.
  bool is_cpu_short(CpuTime had) {
    lately_.ran += had.ran;
    lately_.waited += had.waited;
    for (; lately_.ran + lately_.waited > kLately; lately_.ran /= 2) lately_.waited /= 2;
    return lately_.waited * 2 > lately_.ran;
  }

  // Whoever wakes up takes a CPU and its caches from others: better seldom, and for many pieces.
  static constexpr auto kShortest = std::chrono::milliseconds(50);
  static constexpr auto kMost = std::chrono::seconds(10);      // In all: others wait for its end.
  static constexpr auto kNap = std::chrono::milliseconds(50);  // Before it looks whether to go on.
  static constexpr auto kLook = std::chrono::milliseconds(1);  // Looking takes some microseconds.
  static constexpr auto kLately = std::chrono::milliseconds(10);  // A dozen pieces or two.
  static constexpr auto kLongestPiece = std::chrono::milliseconds(100);

  const double share_;
  Clock::time_point since_;  // When work was begun that is not yet counted.
  Clock::duration owed_ = Clock::duration::zero();
  Clock::duration rested_ = Clock::duration::zero();
  std::thread::id thread_;                 // Who has called.
  CpuTime lately_ = {.ran = kLately / 2};  // Not for the first piece that waits.
};

}  // namespace torch_ckpt
