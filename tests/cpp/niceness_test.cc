#include "base/niceness.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <thread>

namespace torch_ckpt::niceness_test {
namespace {

int own_priority() { return ::getpriority(PRIO_PROCESS, 0); }

TEST(NicenessTest, WorkStepsBackAndItsCallerDoesNot) {
  const int before = own_priority();
  EXPECT_EQ(run_at_niceness(3, own_priority), before + 3);
  EXPECT_EQ(own_priority(), before);
}

TEST(NicenessTest, WithoutNicenessTheCallersThreadDoesTheWork) {
  EXPECT_EQ(run_at_niceness(0, [] { return std::this_thread::get_id(); }),
            std::this_thread::get_id());
}

}  // namespace
}  // namespace torch_ckpt::niceness_test
