#include "io/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "support/status_matchers.h"
#include "support/temp_directory.h"

namespace torch_ckpt::shared_memory_test {
namespace {

TEST(SharedMemoryTest, WhatOneMappingHasTheOtherSees) {
  const TempDirectory directory;
  const std::string path = directory.path() + "/memory";
  ASSERT_OK_AND_ASSIGN(const Memory ours, create_shared_memory(path, 10000));
  EXPECT_EQ(ours.nbytes(), 12288);
  ASSERT_OK_AND_ASSIGN(const Memory theirs, map_shared_memory(path, false));
  EXPECT_EQ(theirs.nbytes(), 12288);
  ours.bytes()[12287] = std::byte{42};
  EXPECT_EQ(theirs.bytes()[12287], std::byte{42});
  EXPECT_EQ(theirs.bytes()[0], std::byte{0});
  struct stat stat = {};
  ASSERT_EQ(::stat(path.c_str(), &stat), 0);
  EXPECT_EQ(stat.st_mode & 0777, 0600u);
}

TEST(SharedMemoryTest, ItIsNeverMadeTwice) {
  const TempDirectory directory;
  ASSERT_OK_AND_ASSIGN(const Memory first, create_shared_memory(directory.path() + "/m", 4096));
  const Status status = create_shared_memory(directory.path() + "/m", 4096).status();
  EXPECT_CODE(status, StatusCode::kStorage);
  EXPECT_EQ(status.error_number(), EEXIST);
}

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

TEST(SharedMemoryTest, WhoFillsItMeetsNoPageFaultAndWhoOnlyMapsItTakesNoPages) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "memory of the sanitizer's own has page faults";
#endif
  constexpr int64_t kNbytes = int64_t{16} << 20;
  char folder[] = "/dev/shm/torch_ckpt-test-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/memory";
  ASSERT_OK(create_shared_memory(path, kNbytes).status());
  for (const bool at_hand : {true, false}) {
    ASSERT_OK_AND_ASSIGN(const Memory memory, map_shared_memory(path, true, at_hand));
    const int64_t before = page_faults();
    std::ranges::fill(memory.bytes(), std::byte{1});
    const int64_t met = page_faults() - before;
    EXPECT_EQ(met < 16, at_hand) << met;
  }
  std::filesystem::remove_all(folder);
}

TEST(SharedMemoryTest, WhatIsNotAllThereIsNotMapped) {
  const TempDirectory directory;
  for (const int64_t nbytes : {1 << 20, 100}) {  // A hole, and a part of a page.
    const std::string path = directory.file(std::to_string(nbytes));
    ASSERT_OK(create_shared_memory(path, 4096).status());
    ASSERT_EQ(::truncate(path.c_str(), nbytes), 0);
    EXPECT_CODE(map_shared_memory(path, false).status(), StatusCode::kCorruption);
  }
  EXPECT_CODE(map_shared_memory(directory.path() + "/none", false).status(), StatusCode::kNotFound);
  EXPECT_FALSE(map_shared_memory(directory.path() + "/", false).ok());
}

TEST(SharedMemoryTest, WhereThereIsNotAsMuchNothingIsLeft) {
  const TempDirectory directory;
  const std::string folder = directory.path() + "/small";
  std::filesystem::create_directory(folder);
  if (::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "this process may not mount a small tmpfs";
  }
  const Status status = create_shared_memory(folder + "/memory", 2 << 20).status();
  const bool is_empty = std::filesystem::is_empty(folder);
  ::umount(folder.c_str());
  EXPECT_CODE(status, StatusCode::kStorage);
  EXPECT_EQ(status.error_number(), ENOSPC);
  EXPECT_TRUE(is_empty);
}

}  // namespace
}  // namespace torch_ckpt::shared_memory_test
