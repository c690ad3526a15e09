#include "io/buffer_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>

#include "support/status_matchers.h"

namespace torch_ckpt::buffer_pool_test {
namespace {

// Memory that is not to be had.
class EmptyMemorySource : public MemorySource {
 public:
  Result<Memory> allocate(int64_t) override { return errno_status(ENOMEM, "cannot allocate"); }
};

HeapMemorySource source;

TEST(BufferPoolTest, CutsTheArenaIntoBlocksThatTouchButDoNotOverlap) {
  ASSERT_OK_AND_ASSIGN(const auto pool, BufferPool::make(source, 8 * kPage, 2 * kPage));
  ASSERT_EQ(pool->block_count(), 4);
  EXPECT_EQ(pool->block_nbytes(), 2 * kPage);
  EXPECT_EQ(ssize(pool->arena()), 8 * kPage);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(pool->block(i).data(), pool->arena().data() + i * 2 * kPage);
    EXPECT_EQ(ssize(pool->block(i)), 2 * kPage);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pool->block(i).data()) % kPage, 0u);
  }
}

// Direct I/O needs every block on a page, so an odd size is made larger, never smaller.
TEST(BufferPoolTest, RoundsBlocksUpToPagesWithinTheBudget) {
  ASSERT_OK_AND_ASSIGN(const auto pool, BufferPool::make(source, 5 * kPage + 17, kPage + 1));
  EXPECT_EQ(pool->block_nbytes(), 2 * kPage);
  EXPECT_EQ(pool->block_count(), 2);
  EXPECT_LE(ssize(pool->arena()), 5 * kPage + 17);
}

TEST(BufferPoolTest, RefusesWhatDoesNotGiveTwoBlocks) {
  EXPECT_CODE(BufferPool::make(source, kPage, kPage), StatusCode::kInvalidArgument);
  EXPECT_CODE(BufferPool::make(source, 3 * kPage, 2 * kPage), StatusCode::kInvalidArgument);
  EXPECT_CODE(BufferPool::make(source, kPage, 0), StatusCode::kInvalidArgument);
  EXPECT_CODE(BufferPool::make(source, kPage, -kPage), StatusCode::kInvalidArgument);
  EXPECT_CODE(BufferPool::make(source, -1, kPage), StatusCode::kInvalidArgument);
  EXPECT_CODE(BufferPool::make(source, INT64_MAX, INT64_MAX), StatusCode::kInvalidArgument);
}

TEST(BufferPoolTest, PassesOnThatThereIsNoMemory) {
  EmptyMemorySource none;
  EXPECT_CODE(BufferPool::make(none, 4 * kPage, kPage), StatusCode::kStorage);
}

TEST(BufferPoolTest, GivesEachBlockToOneHolderOnly) {
  ASSERT_OK_AND_ASSIGN(const auto pool, BufferPool::make(source, 4 * kPage, kPage));
  std::set<int> held;
  while (const auto index = pool->acquire()) held.insert(*index);
  EXPECT_THAT(held, testing::ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(pool->free_count(), 0);

  pool->release(2);
  EXPECT_EQ(pool->free_count(), 1);
  EXPECT_EQ(pool->acquire(), 2);
  EXPECT_EQ(pool->acquire(), std::nullopt);
}

// A block released twice must not end up with two holders.
TEST(BufferPoolTest, ASecondReleaseDoesNothing) {
  ASSERT_OK_AND_ASSIGN(const auto pool, BufferPool::make(source, 2 * kPage, kPage));
  const auto a = pool->acquire();
  const auto b = pool->acquire();
  ASSERT_TRUE(a && b);
  pool->release(*a);
  pool->release(*a);
  pool->release(-1);
  pool->release(2);
  EXPECT_EQ(pool->acquire(), a);
  EXPECT_EQ(pool->acquire(), std::nullopt);
}

}  // namespace
}  // namespace torch_ckpt::buffer_pool_test
