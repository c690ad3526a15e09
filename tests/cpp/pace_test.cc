#include "base/pace.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>

namespace torch_ckpt {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(PaceTest, WorkIsFollowedByARestThatMakesItItsShare) {
  Pace::Clock::time_point now;
  Pace pace(0.25, now);
  now += milliseconds(10);
  EXPECT_EQ(pace.rest_at(now), milliseconds(30));
  now += milliseconds(30 + 5);
  EXPECT_EQ(pace.rest_at(now), milliseconds(15));
}

TEST(PaceTest, WhatIsTooShortForARestIsMadeUpForLater) {
  Pace::Clock::time_point now;
  Pace pace(0.5, now);
  now += microseconds(600);
  EXPECT_EQ(pace.rest_at(now), microseconds(0));
  now += microseconds(600);
  EXPECT_EQ(pace.rest_at(now), microseconds(1200));
}

TEST(PaceTest, WhoeverSleepsTooLongHasWorked) {  // As far as it knows; it rests the more.
  Pace::Clock::time_point now;
  Pace pace(0.5, now);
  now += milliseconds(4);
  EXPECT_EQ(pace.rest_at(now), milliseconds(4));
  now += milliseconds(4 + 1);
  EXPECT_EQ(pace.rest_at(now), milliseconds(1));
}

TEST(PaceTest, OverTimeWorkHasItsShare) {
  std::mt19937 random(7);
  for (const double share : {0.05, 0.3, 0.9, 1.0}) {
    Pace::Clock::time_point now;
    Pace pace(share, now);
    Pace::Clock::duration worked{};
    for (int i = 0; i < 1000; ++i) {
      const microseconds piece(random() % 5000);
      worked += piece;
      now += piece;
      now += pace.rest_at(now);
    }
    const double whole = std::chrono::duration<double>(now.time_since_epoch()).count();
    EXPECT_NEAR(std::chrono::duration<double>(worked).count() / whole, share, 0.01);
  }
}

}  // namespace
}  // namespace torch_ckpt
