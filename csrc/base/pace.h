#pragma once

// Work in the background of something else: how far it steps back, and rests while it does.

#include <chrono>
#include <thread>

namespace torch_ckpt {

struct Background {
  int niceness = 0;  // As nice(1) has it (base/niceness.h).
  double share = 1;  // Most of the time that it is at work, for the rest it rests. In (0, 1].
};

// Counts the time of one thread's work, and has it rest in between. Used by that thread.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // Work begins now. Requires: 0 < share <= 1.
  explicit Pace(double share, Clock::time_point now = Clock::now()) : share_(share), since_(now) {}

  // To be called between pieces of work: rests for as long as those since the last rest demand.
  void rest() {
    if (share_ >= 1) return;
    const Clock::duration rest = rest_at(Clock::now());
    if (rest > Clock::duration::zero()) std::this_thread::sleep_for(rest);
  }

  // The same for a clock that says this: returns how long to rest, and counts on that.
  Clock::duration rest_at(Clock::time_point now) {
    using Seconds = std::chrono::duration<double>;
    owed_ += std::chrono::duration_cast<Clock::duration>(Seconds(now - since_) * (1 / share_ - 1));
    since_ = now;
    if (owed_ < kShortest) return Clock::duration::zero();
    const Clock::duration rest = owed_;
    owed_ = Clock::duration::zero();
    since_ += rest;
    return rest;
  }

 private:
  static constexpr auto kShortest = std::chrono::milliseconds(1);  // What sleeping is exact for.

  const double share_;
  Clock::time_point since_;  // When work was begun that is not yet counted.
  Clock::duration owed_ = Clock::duration::zero();
};

}  // namespace torch_ckpt
