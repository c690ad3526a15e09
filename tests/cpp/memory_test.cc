#include "base/memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/status_matchers.h"

namespace torch_ckpt::memory_test {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;

uintptr_t address_of(const Memory& memory) {
  return reinterpret_cast<uintptr_t>(memory.bytes().data());
}

HeapMemorySource source;

// Direct I/O refuses memory that does not start on a page, whatever the size asked for.
TEST(HeapMemoryTest, IsZeroedWholePages) {
  for (const int64_t nbytes : {int64_t{1}, kPage, kPage + 1, kHugePage - 1, kHugePage + 1}) {
    ASSERT_OK_AND_ASSIGN(const Memory memory, source.allocate(nbytes));
    EXPECT_EQ(memory.nbytes(), align_up(nbytes, kPage));
    EXPECT_EQ(address_of(memory) % kPage, 0u);
    EXPECT_TRUE(std::ranges::all_of(memory.bytes(), [](std::byte b) { return b == std::byte{}; }));
    // To the last byte: trimming the block to its alignment must not cut into it.
    std::ranges::fill(memory.bytes(), std::byte{0xAB});
  }
}

// Else the kernel could not back it with huge pages from its first byte on.
TEST(HeapMemoryTest, ALargeBlockStartsOnAHugePage) {
  ASSERT_OK_AND_ASSIGN(const Memory memory, source.allocate(3 * kHugePage + kPage));
  EXPECT_EQ(address_of(memory) % kHugePage, 0u);
}

TEST(HeapMemoryTest, TwoBlocksDoNotOverlap) {
  ASSERT_OK_AND_ASSIGN(const Memory a, source.allocate(3 * kHugePage));
  ASSERT_OK_AND_ASSIGN(const Memory b, source.allocate(3 * kHugePage));
  std::ranges::fill(a.bytes(), std::byte{1});
  std::ranges::fill(b.bytes(), std::byte{2});
  EXPECT_TRUE(std::ranges::all_of(a.bytes(), [](std::byte byte) { return byte == std::byte{1}; }));
}

// Returns the number of pages that the process has of a block.
int64_t resident_pages(const Memory& memory) {
  std::vector<unsigned char> pages(static_cast<size_t>(memory.nbytes() / kPage));
  EXPECT_EQ(::mincore(memory.bytes().data(), memory.bytes().size(), pages.data()), 0);
  return std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
}

TEST(HeapMemoryTest, PopulatingAllocatesAllPagesAndKeepsTheBytes) {
  for (const int64_t nbytes : {kPage, kHugePage - kPage, kHugePage, 5 * kHugePage + 3 * kPage}) {
    for (const int threads : {1, 3}) {
      ASSERT_OK_AND_ASSIGN(Memory memory, source.allocate(nbytes));
      memory.bytes().back() = std::byte{7};
      ASSERT_OK(memory.populate(threads));
      EXPECT_EQ(resident_pages(memory), nbytes / kPage);
      EXPECT_EQ(memory.bytes().back(), std::byte{7});
      ASSERT_OK(memory.populate(threads));
    }
  }
}

TEST(HeapMemoryTest, MoreThanThereIsGivesAnError) {
  const Result<Memory> memory = source.allocate(int64_t{1} << 60);
  ASSERT_CODE(memory, StatusCode::kStorage);
  EXPECT_EQ(memory.status().error_number(), ENOMEM);
}

TEST(HeapMemoryTest, MovingHandsTheSameBytesOver) {
  ASSERT_OK_AND_ASSIGN(Memory first, source.allocate(kPage));
  const std::byte* const where = first.bytes().data();
  Memory second = std::move(first);
  EXPECT_EQ(second.bytes().data(), where);
  EXPECT_EQ(Memory().nbytes(), 0);
}

}  // namespace
}  // namespace torch_ckpt::memory_test
