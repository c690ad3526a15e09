#include "base/pace.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "base/cpu_time.h"

namespace torch_ckpt {
namespace {

using std::chrono::milliseconds;
using Clock = Pace::Clock;

constexpr CpuTime kShort = {.ran = milliseconds(1), .waited = milliseconds(10)};
constexpr CpuTime kFree = {.ran = milliseconds(1), .waited = milliseconds(0)};

TEST(PaceTest, WorkIsFollowedByARestThatMakesItItsShare) {
  Clock::time_point now;
  Pace pace(0.25, now);
  now += milliseconds(20);
  EXPECT_EQ(pace.rest_at(now, kShort), milliseconds(60));
  now += milliseconds(60 + 30);
  EXPECT_EQ(pace.rest_at(now, kShort), milliseconds(90));
}

TEST(PaceTest, WhatIsTooShortForARestIsMadeUpForLater) {
  Clock::time_point now;
  Pace pace(0.5, now);
  now += milliseconds(30);
  EXPECT_EQ(pace.rest_at(now, kShort), milliseconds(0));
  now += milliseconds(30);
  EXPECT_EQ(pace.rest_at(now, kShort), milliseconds(60));
}

TEST(PaceTest, WhoeverSleepsTooLongHasWorked) {  // As far as it knows; it rests the more.
  Clock::time_point now;
  Pace pace(0.25, now);
  now += milliseconds(20);
  EXPECT_EQ(pace.rest_at(now, kShort), milliseconds(60));
  now += milliseconds(60 + 20);
  EXPECT_EQ(pace.rest_at(now, kShort), milliseconds(60));
}

TEST(PaceTest, WithACpuForItNothingRests) {
  Clock::time_point now;
  Pace pace(0.1, now);
  for (int i = 0; i < 100; ++i) {
    now += milliseconds(20);
    EXPECT_EQ(pace.rest_at(now, kFree), milliseconds(0));
  }
}

TEST(PaceTest, ShortOfCpusIsWhatItIsOfLate) {
  Clock::time_point now;
  Pace pace(0.1, now);
  const auto rests = [&](int pieces, CpuTime had) {
    int count = 0;
    for (int i = 0; i < pieces; ++i) {
      now += milliseconds(20);
      const Clock::duration rest = pace.rest_at(now, had);
      now += rest;
      if (rest > Clock::duration::zero()) ++count;
    }
    return count;
  };
  EXPECT_EQ(rests(1000, kFree), 0);
  EXPECT_GE(rests(30, kShort), 20);  // However long there was one.
  EXPECT_LE(rests(30, kFree), 10);
  EXPECT_EQ(rests(100, CpuTime()), 0);  // Where the kernel does not tell, and for what is over.
}

TEST(PaceTest, InHasteNothingRests) {
  Clock::time_point now;
  Pace pace(0.1, now);
  const auto rest = [&] { return pace.rest_at(now += milliseconds(20), kShort); };
  EXPECT_EQ(rest(), milliseconds(180));
  {
    const Haste haste;
    now += milliseconds(180);
    EXPECT_EQ(rest(), milliseconds(0));
    const Haste another;
    EXPECT_EQ(rest(), milliseconds(0));
  }
  EXPECT_EQ(rest(), milliseconds(180));  // Nor is it made up for.
}

TEST(PaceTest, ItDoesNotRestForEver) {
  for (const auto piece : {milliseconds(20), milliseconds(3600 * 1000)}) {
    Clock::time_point now;
    Pace pace(0.1, now);
    Clock::duration rested{};
    for (int i = 0; i < 1000; ++i) {
      now += piece;
      const Clock::duration rest = pace.rest_at(now, kShort);
      EXPECT_LE(rest, std::chrono::seconds(1));  // Whatever a disk took for one piece.
      now += rest;
      rested += rest;
    }
    EXPECT_GE(rested, milliseconds(9950));
    EXPECT_LE(rested, milliseconds(10000));
  }
}

TEST(PaceTest, OverTimeWorkHasItsShare) {
  std::mt19937 random(7);
  for (const double share : {0.05, 0.3, 0.9}) {
    Clock::time_point now;
    Pace pace(share, now);
    Clock::duration worked{};
    const double most = 8 / 0.0025 / (1 / share - 1);  // Pieces: 8 s of rests, which have an end.
    for (int i = 0; i < most; ++i) {
      const std::chrono::microseconds piece(random() % 5000);
      worked += piece;
      now += piece;
      now += pace.rest_at(now, kShort);
    }
    const double whole = std::chrono::duration<double>(now.time_since_epoch()).count();
    EXPECT_NEAR(std::chrono::duration<double>(worked).count() / whole, share, 0.01);
  }
}

void spin(Clock::duration duration) {
  for (const auto end = Clock::now() + duration; Clock::now() < end;) {
  }
}

// Has the caller's thread and those that it starts share one CPU.
void share_one_cpu() {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(::sched_getcpu(), &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
}

TEST(CpuTimeTest, ThreadsOfOneCpuWaitForEachOther) {
  std::thread([] {
    share_one_cpu();
    (void)take_cpu_time();
    std::atomic<bool> over = false;
    std::thread other([&] {
      while (!over) {
      }
    });
    spin(milliseconds(400));
    const CpuTime had = take_cpu_time();
    over = true;
    other.join();
    if (had.ran.count() == 0) GTEST_SKIP() << "the kernel does not tell";
    // Halves of 400 ms, or what whoever else shares this machine leaves of them.
    EXPECT_GE(had.waited, milliseconds(100));
    EXPECT_LE(had.ran, milliseconds(300));
    EXPECT_GE(had.ran + had.waited, milliseconds(350));
    EXPECT_LE(take_cpu_time().waited, milliseconds(100));  // It was taken.
  }).join();
}

TEST(CpuTimeTest, EachThreadHasItsOwn) {
  (void)take_cpu_time();
  std::thread([] {
    spin(milliseconds(50));
    (void)take_cpu_time();
  }).join();
  EXPECT_LE(take_cpu_time().ran, milliseconds(25));
}

}  // namespace
}  // namespace torch_ckpt
