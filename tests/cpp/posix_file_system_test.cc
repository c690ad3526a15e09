#include "io/posix_file_system.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/page_cache.h"
#include "io/posix_file.h"
#include "support/read_file.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"

namespace torch_ckpt::posix_file_system_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kBlock = 4096;

class PosixFileSystemTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_.file(name); }

  PosixFileSystem fs_;
  TempDirectory directory_;
};

TEST_F(PosixFileSystemTest, AMissingDirectoryIsNotFound) {
  EXPECT_CODE(fs_.list_directory(path("a")), StatusCode::kNotFound);
  EXPECT_CODE(fs_.sync_directory(path("a")), StatusCode::kNotFound);
}

TEST_F(PosixFileSystemTest, ASharedFileIsNotWrittenThroughALink) {
  ASSERT_OK(write_file(fs_, path("a"), as_bytes("old"), false));
  ASSERT_EQ(::symlink(path("a").c_str(), path("link").c_str()), 0);
  const auto file = fs_.open(path("link"), OpenMode::kUpdate, Caching::kBuffered);
  EXPECT_EQ(file.status().error_number(), ELOOP);
}

TEST_F(PosixFileSystemTest, OpeningAFolderAsAFileFails) {
  const auto file = fs_.open(directory_.path(), OpenMode::kRead, Caching::kDirect);
  ASSERT_CODE(file, StatusCode::kStorage);
  EXPECT_EQ(file.status().error_number(), EISDIR);
}

// Opening a FIFO as a file is opened would wait for a writer that may never come.
TEST_F(PosixFileSystemTest, WhatIsNoRegularFileIsRefusedAtOnceAndByName) {
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  ASSERT_EQ(::symlink("fifo", path("link").c_str()), 0);
  const std::vector<std::pair<std::string, std::string>> names = {
      {path("fifo"), "a FIFO"}, {path("link"), "a FIFO"}, {"/dev/zero", "a device"}};
  for (const auto& [name, kind] : names) {
    for (const Caching caching : {Caching::kBuffered, Caching::kDirect}) {
      const auto file = fs_.open(name, OpenMode::kRead, caching);
      ASSERT_CODE(file, StatusCode::kStorage);
      EXPECT_EQ(file.status().message(),
                "cannot open " + name + ": it is " + kind + ", and not a regular file");
    }
  }
}

// Caches of models keep their files elsewhere, behind links.
TEST_F(PosixFileSystemTest, LinksAreFollowed) {
  ASSERT_OK(write_file(fs_, path("a"), as_bytes("some bytes"), false));
  ASSERT_EQ(::symlink("a", path("link").c_str()), 0);
  ASSERT_EQ(::symlink("none", path("dangling").c_str()), 0);
  ASSERT_EQ(::symlink("loop", path("loop").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs_, path("link")));
  EXPECT_EQ(as_text(bytes), "some bytes");
  EXPECT_CODE(read_file(fs_, path("dangling")), StatusCode::kNotFound);
  EXPECT_EQ(read_file(fs_, path("loop")).status().error_number(), ELOOP);
  const Status taken = write_file(fs_, path("dangling"), as_bytes("new"), false);
  EXPECT_EQ(taken.error_number(), EEXIST);
}

// io_uring would report EAGAIN where it could wait.
TEST_F(PosixFileSystemTest, FilesAreReadWithoutTheFlagTheyAreOpenedWith) {
  ASSERT_OK(write_file(fs_, path("a"), as_bytes("x"), false));
  ASSERT_OK_AND_ASSIGN(const auto file,
                       PosixFile::open(path("a"), OpenMode::kRead, Caching::kDirect));
  EXPECT_EQ(::fcntl(file->buffered_fd(), F_GETFL) & (O_NONBLOCK | O_DIRECT), 0);
  if (file->direct_fd() >= 0) {
    EXPECT_EQ(::fcntl(file->direct_fd(), F_GETFL) & (O_NONBLOCK | O_DIRECT), O_DIRECT);
  }
}

TEST_F(PosixFileSystemTest, ADirectFileIsAlignedOrSaysWhyNotAndABufferedOneIsNot) {
  ASSERT_OK_AND_ASSIGN(const auto buffered,
                       fs_.open(path("b"), OpenMode::kCreate, Caching::kBuffered));
  EXPECT_EQ(buffered->alignment(), 1);
  EXPECT_THAT(buffered->fallback_reason(), IsEmpty());
  EXPECT_EQ(buffered->path(), path("b"));
  ASSERT_OK_AND_ASSIGN(const auto file, fs_.open(path("a"), OpenMode::kCreate, Caching::kDirect));
  EXPECT_EQ(file->alignment() == 1, !file->fallback_reason().empty());
  EXPECT_TRUE(file->alignment() == 1 || file->alignment() == kBlock);
}

// /proc has no direct I/O on any kernel.
TEST_F(PosixFileSystemTest, WhereODirectIsRefusedTheFileIsBufferedAndSaysWhy) {
  ASSERT_OK_AND_ASSIGN(const auto file,
                       fs_.open("/proc/version", OpenMode::kRead, Caching::kDirect));
  EXPECT_EQ(file->alignment(), 1);
  EXPECT_EQ(file->fallback_reason(), "O_DIRECT refused by the file system (EINVAL)");
}

// A training script starts other programs; they must not keep our files open.
TEST_F(PosixFileSystemTest, DescriptorsAreClosedInOtherPrograms) {
  ASSERT_OK_AND_ASSIGN(const auto file,
                       PosixFile::open(path("a"), OpenMode::kCreate, Caching::kDirect));
  EXPECT_TRUE(::fcntl(file->buffered_fd(), F_GETFD) & FD_CLOEXEC);
  if (file->direct_fd() >= 0) {
    EXPECT_TRUE(::fcntl(file->direct_fd(), F_GETFD) & FD_CLOEXEC);
  }
}

// A save opens thousands of files over its life.
TEST_F(PosixFileSystemTest, AFileGivesItsDescriptorsBack) {
  ASSERT_OK(write_file(fs_, path("a"), as_bytes("x"), false));
  const int before = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::close(before);
  for (int i = 0; i < 3; ++i) {
    EXPECT_OK(fs_.open(path("a"), OpenMode::kRead, Caching::kDirect));
    EXPECT_CODE(fs_.open(path("none"), OpenMode::kRead, Caching::kDirect), StatusCode::kNotFound);
    EXPECT_OK(read_file(fs_, path("a")));
    EXPECT_OK(fs_.sync_directory(directory_.path()));
    EXPECT_OK(fs_.list_directory(directory_.path()));
  }
  const int after = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::close(after);
  EXPECT_EQ(after, before);  // The lowest free number is the same again.
}

// The point of it: running out of space is found out before the first byte is written.
TEST_F(PosixFileSystemTest, PreallocateReservesRoomOnTheDisk) {
  ASSERT_OK_AND_ASSIGN(const auto file, fs_.open(path("a"), OpenMode::kCreate, Caching::kDirect));
  ASSERT_OK(file->preallocate(16 * kBlock));
  struct stat stat = {};
  ASSERT_EQ(::stat(path("a").c_str(), &stat), 0);
  EXPECT_GE(stat.st_blocks * 512, 16 * kBlock);

  const Status status = file->preallocate(int64_t{1} << 62);
  EXPECT_EQ(status.code(), StatusCode::kStorage);
  EXPECT_THAT(status.message(), HasSubstr(path("a")));
}

TEST_F(PosixFileSystemTest, CreatesWhateverFoldersAreMissing) {
  ASSERT_OK(fs_.create_directories(path("a/b//c/")));
  EXPECT_OK(fs_.list_directory(path("a/b/c")));
  EXPECT_OK(fs_.create_directories(path("a/b/c")));  // Already there.
  EXPECT_OK(fs_.create_directories("."));
  EXPECT_OK(fs_.create_directories("/"));
  EXPECT_CODE(fs_.create_directories(""), StatusCode::kInvalidArgument);
}

TEST_F(PosixFileSystemTest, AFileInTheWayOfAFolderIsAnError) {
  ASSERT_OK(write_file(fs_, path("a"), {}, false));
  for (const std::string& name : {path("a"), path("a/b")}) {
    const Status status = fs_.create_directories(name);
    EXPECT_EQ(status.code(), StatusCode::kStorage) << status.to_string();
    EXPECT_EQ(status.error_number(), ENOTDIR);
  }
}

TEST_F(PosixFileSystemTest, ALinkToNothingInTheWayOfAFolderIsNamedWithItsTarget) {
  ASSERT_EQ(::symlink("archive/step-9", path("step-9").c_str()), 0);
  for (const char* name : {"step-9", "step-9/", "step-9/a/b"}) {
    const Status status = fs_.create_directories(path(name));
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.to_string();
    EXPECT_EQ(status.error_number(), ENOENT);
    EXPECT_THAT(status.message(), HasSubstr(path("step-9")));
    EXPECT_THAT(status.message(), HasSubstr("is a symbolic link whose target archive/step-9 does"));
  }
  ASSERT_OK(fs_.create_directories(path("archive/step-9")));
  EXPECT_OK(fs_.create_directories(path("step-9/a/b")));  // The archive is mounted.
}

TEST_F(PosixFileSystemTest, RemovesFilesAndOnlyEmptyFolders) {
  ASSERT_OK(fs_.create_directories(path("a")));
  ASSERT_OK(write_file(fs_, path("a/b"), {}, false));
  const Status full = fs_.remove(path("a"));
  EXPECT_EQ(full.error_number(), ENOTEMPTY) << full.to_string();
  EXPECT_OK(fs_.remove(path("a/b")));
  EXPECT_OK(fs_.remove(path("a")));
}

// For machines where io_uring is there but not to be used.
TEST_F(PosixFileSystemTest, ALinkIsAnotherNameOfTheFileAlsoBehindASymbolicLink) {
  ASSERT_OK(write_file(fs_, path("a"), as_bytes("bytes"), false));
  ASSERT_EQ(::symlink("a", path("symbolic").c_str()), 0);
  for (const bool sync : {false, true}) {
    for (const char* from : {"a", "symbolic"}) {
      ASSERT_OK(fs_.link(path(from), path("b"), sync));
      struct stat a = {};
      struct stat b = {};
      ASSERT_EQ(::lstat(path("a").c_str(), &a), 0);
      ASSERT_EQ(::lstat(path("b").c_str(), &b), 0);
      EXPECT_EQ(a.st_ino, b.st_ino);
      ASSERT_OK(fs_.remove(path("b")));
    }
  }
}

TEST_F(PosixFileSystemTest, WhatHasNoLinksIsUnsupported) {
  // The tests are not on /proc.
  EXPECT_CODE(fs_.link("/proc/self/stat", path("a"), false), StatusCode::kUnsupported);
  ASSERT_OK(fs_.create_directories(path("folder")));
  EXPECT_CODE(fs_.link(path("folder"), path("a"), false), StatusCode::kUnsupported);
  EXPECT_CODE(fs_.link(path("none"), path("a"), false), StatusCode::kNotFound);
  ASSERT_OK(write_file(fs_, path("b"), as_bytes("bytes"), false));
  EXPECT_CODE(fs_.link(path("b"), path("nowhere/b"), false), StatusCode::kNotFound);
  EXPECT_EQ(fs_.link(path("b"), path("folder"), false).error_number(), EEXIST);
}

TEST_F(PosixFileSystemTest, TheEnvironmentForcesThreads) {
  ASSERT_EQ(::setenv("TORCH_CKPT_IO", "threads", 1), 0);
  const auto queue = fs_.make_queue(4);
  ASSERT_EQ(::unsetenv("TORCH_CKPT_IO"), 0);
  EXPECT_EQ(queue->mode().name, "threads");
  EXPECT_EQ(queue->mode().reason, "TORCH_CKPT_IO=threads is set");
  EXPECT_EQ(queue->room(), 4);
}

class ResidencyTest : public PosixFileSystemTest {
 protected:
  static constexpr int64_t kLength = 8 * kBlock + 10;  // The last page is partial.

  void SetUp() override {
    ASSERT_OK(write_file(fs_, path("a"), std::vector<std::byte>(kLength), true));
    auto file = PosixFile::open(path("a"), OpenMode::kRead, Caching::kDirect);
    ASSERT_OK(file);
    file_ = std::move(*file);
  }

  void drop_from_cache() {
    // Else neither the kernel would read more than asked for, nor pages be kept.
    ASSERT_EQ(::posix_fadvise(file_->buffered_fd(), 0, 0, POSIX_FADV_RANDOM), 0);
    ASSERT_EQ(::posix_fadvise(file_->buffered_fd(), 0, 0, POSIX_FADV_DONTNEED), 0);
  }
  void read_page(int64_t page) {
    std::byte byte;
    ASSERT_EQ(::pread(file_->buffered_fd(), &byte, 1, page * kBlock), 1);
  }

  std::unique_ptr<PosixFile> file_;
};

TEST_F(ResidencyTest, WhatWasJustWrittenIsResident) {
  EXPECT_TRUE(file_->is_resident(0, kLength));
  EXPECT_TRUE(file_->is_resident(8 * kBlock, 10));  // The partial page alone.
  EXPECT_TRUE(file_->is_resident(kBlock - 1, 2));   // Across a page boundary.
}

TEST_F(ResidencyTest, WhatWasDroppedIsResidentWhenABufferedReadHasBroughtItIn) {
  drop_from_cache();
  EXPECT_FALSE(file_->is_resident(0, kLength));
  EXPECT_FALSE(file_->is_resident(8 * kBlock, 10));
  for (int64_t page = 0; page <= 8; ++page) read_page(page);
  EXPECT_TRUE(file_->is_resident(0, kLength));
}

// One page away from the disk is still a read from the disk.
TEST_F(ResidencyTest, EveryPageCounts) {
  drop_from_cache();
  for (const int64_t page : {0, 1, 3, 4, 8}) read_page(page);
  EXPECT_FALSE(file_->is_resident(0, kLength));
  EXPECT_TRUE(file_->is_resident(0, 2 * kBlock));
  EXPECT_FALSE(file_->is_resident(0, 2 * kBlock + 1));
  EXPECT_TRUE(file_->is_resident(3 * kBlock, 2 * kBlock));
  EXPECT_FALSE(file_->is_resident(3 * kBlock - 1, 2 * kBlock));
  EXPECT_TRUE(file_->is_resident(8 * kBlock, 10));
}

TEST_F(ResidencyTest, OddRangesHaveAnAnswer) {
  EXPECT_TRUE(file_->is_resident(0, 0));
  EXPECT_FALSE(file_->is_resident(-1, 10));
  EXPECT_FALSE(file_->is_resident(0, -1));
  EXPECT_FALSE(file_->is_resident(0, kLength + kBlock));  // Nothing is cached past the end.
}

// What serves kernels without `cachestat`.
TEST_F(ResidencyTest, ProbesSeeAMissingPageAtEitherEnd) {
  EXPECT_TRUE(probe_page_cache(file_->buffered_fd(), 0, kLength));
  bool first_missed = false;
  bool last_missed = false;
  // A probe has the kernel begin to read what is missing, and a fast disk is done before it looks.
  for (int i = 0; i < 1000 && !(first_missed && last_missed); ++i) {
    drop_from_cache();
    first_missed |= !probe_page_cache(file_->buffered_fd(), 0, kLength);
    drop_from_cache();
    read_page(0);
    last_missed |= !probe_page_cache(file_->buffered_fd(), 0, kLength);
  }
  EXPECT_TRUE(first_missed);
  EXPECT_TRUE(last_missed);
}

}  // namespace
}  // namespace torch_ckpt::posix_file_system_test
