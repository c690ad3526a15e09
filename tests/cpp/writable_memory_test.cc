#include "base/writable_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace torch_ckpt::writable_memory_test {
namespace {

class WritableMemoryTest : public ::testing::Test {
 protected:
  const size_t page_ = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::byte* memory_ = static_cast<std::byte*>(
      ::mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));

  void TearDown() override { ::munmap(memory_, 2 * page_); }
};

TEST_F(WritableMemoryTest, OnlyThePageOfTheByteCounts) {
  ASSERT_NE(memory_, MAP_FAILED);
  ASSERT_EQ(::mprotect(memory_ + page_, page_, PROT_READ), 0);
  EXPECT_TRUE(is_writable(memory_ + page_ - 1));
  EXPECT_FALSE(is_writable(memory_ + page_));
  ASSERT_EQ(::mprotect(memory_, page_, PROT_NONE), 0);
  EXPECT_FALSE(is_writable(memory_));
}

TEST_F(WritableMemoryTest, TheByteKeepsItsValue) {
  ASSERT_NE(memory_, MAP_FAILED);
  memory_[5] = std::byte{42};
  EXPECT_TRUE(is_writable(memory_ + 5));
  EXPECT_EQ(memory_[5], std::byte{42});
}

}  // namespace
}  // namespace torch_ckpt::writable_memory_test
