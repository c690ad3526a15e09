#include "base/retry.h"

#include <gtest/gtest.h>

namespace torch_ckpt {
namespace {

TEST(RetryTest, ACallThatIsInterruptedAFewTimesSucceeds) {
  int left = 5;
  const auto call = [&] {
    errno = EINTR;
    return left-- > 0 ? -1 : 7;
  };
  EXPECT_EQ(retry_interrupted(call), 7);
}

TEST(RetryTest, ACallThatIsInterruptedEachTimeFails) {
  int attempts = 0;
  const auto call = [&] {
    ++attempts;
    errno = EINTR;
    return -1;
  };
  EXPECT_EQ(retry_interrupted(call), -1);
  EXPECT_EQ(errno, EINTR);
  EXPECT_EQ(attempts, kMaxAttempts);
}

TEST(RetryTest, ACallThatFailsForAnotherReasonIsNotRepeated) {
  int attempts = 0;
  const auto call = [&] {
    ++attempts;
    errno = EIO;
    return -1;
  };
  EXPECT_EQ(retry_interrupted(call), -1);
  EXPECT_EQ(attempts, 1);
}

}  // namespace
}  // namespace torch_ckpt
