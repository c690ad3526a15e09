// The read loop over a disk in memory, with blocks so small that every limit is met.

#include "engine/read_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "support/memory_file_system.h"
#include "support/memory_object_store.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::read_stream_test {
namespace {

constexpr int64_t kBlock = 16 << 10;
constexpr int64_t kInPlace = 256 << 10;  // From here on, ranges with a destination stand alone.

std::string random_text(int64_t nbytes, uint32_t seed) {
  return std::string(as_text(random_bytes(nbytes, seed)));
}

std::unique_ptr<File> open_for_reading(FileSystem& fs, const std::string& path) {
  auto file = fs.open(path, OpenMode::kRead, Caching::kDirect);
  EXPECT_OK(file);
  return std::move(*file);
}

std::unique_ptr<ReadStream> make_stream(FileSystem& fs, int threads = 1,
                                        int64_t block_nbytes = kBlock) {
  auto stream = ReadStream::make(fs, 6 * threads * block_nbytes, block_nbytes, threads);
  EXPECT_OK(stream);
  return std::move(*stream);
}

// One file, and ranges of it that are wanted.
struct OneFile {
  MemoryFileSystem& fs;
  std::string text;
  std::unique_ptr<File> file;

  OneFile(MemoryFileSystem& file_system, int64_t nbytes)
      : fs(file_system), text(random_text(nbytes, 11)) {
    fs.put("a", text);
    file = open_for_reading(fs, "a");
  }
  WantedRange range(int64_t begin, int64_t end, std::byte* destination = nullptr) const {
    return {file.get(), {begin, end}, destination};
  }
  ConsumeRange checker(const std::vector<WantedRange>& wanted, std::atomic<int>& consumed) const {
    return [&](int64_t index, Bytes bytes, Unpacking&) {
      const ByteRange& range = wanted[static_cast<size_t>(index)].range;
      EXPECT_TRUE(as_text(bytes) ==
                  std::string_view(text).substr(static_cast<size_t>(range.begin),
                                                static_cast<size_t>(range.nbytes())));
      ++consumed;
      return ok_status();
    };
  }
};

TEST(ReadStreamTest, RandomRangesOfSeveralFilesAreEachConsumedOnce) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    MemoryFileSystem fs(
        {.alignment = seed % 2 == 0 ? 4096 : 1, .resident = seed % 3 == 0, .seed = seed});
    std::vector<std::string> texts;
    std::vector<std::unique_ptr<File>> files;
    for (uint32_t i = 0; i < 3; ++i) {
      texts.push_back(random_text(1 + pick(random, 300000), i));
      fs.put(std::to_string(i), texts.back());
      files.push_back(open_for_reading(fs, std::to_string(i)));
    }
    const auto stream = make_stream(fs, 1 + static_cast<int>(seed % 4));
    std::vector<WantedRange> wanted;
    std::vector<size_t> file_of;
    for (int i = 0; i < 200; ++i) {
      file_of.push_back(random() % 3);
      const auto size = static_cast<int64_t>(texts[file_of.back()].size());
      const int64_t begin = pick(random, size + 1);
      const int64_t most = std::min(size - begin, stream->max_range_nbytes());
      wanted.push_back({files[file_of.back()].get(), {begin, begin + pick(random, most + 1)}});
    }
    std::vector<std::atomic<int>> times(wanted.size());
    ASSERT_OK(stream->run(wanted, [&](int64_t index, Bytes bytes, Unpacking&) {
      const auto i = static_cast<size_t>(index);
      const ByteRange& range = wanted[i].range;
      EXPECT_TRUE(as_text(bytes) == std::string_view(texts[file_of[i]])
                                        .substr(static_cast<size_t>(range.begin),
                                                static_cast<size_t>(range.nbytes())));
      ++times[i];
      return ok_status();
    }));
    for (const std::atomic<int>& count : times) ASSERT_EQ(count, 1);
  }
}

TEST(ReadStreamTest, TheLongestRangeFitsABlockAtAnyAlignment) {
  MemoryFileSystem fs;
  const OneFile a(fs, 100000);
  const auto stream = make_stream(fs);
  const int64_t longest = stream->max_range_nbytes();
  for (const int64_t begin : {0, 1, 4095, 4096, 4097}) {
    const std::vector<WantedRange> wanted = {a.range(begin, begin + longest)};
    std::atomic<int> consumed = 0;
    ASSERT_OK(stream->run(wanted, a.checker(wanted, consumed)));
    EXPECT_EQ(consumed, 1);
  }
}

TEST(ReadStreamTest, NothingWantedReadsNothing) {
  MemoryFileSystem fs;
  const auto stream = make_stream(fs, 3);
  EXPECT_OK(
      stream->run({}, [](int64_t, Bytes, Unpacking&) { return internal_error("not called"); }));
  EXPECT_TRUE(fs.operations().empty());
}

TEST(ReadStreamTest, NeighboursAreReadTogether) {
  MemoryFileSystem fs;
  const OneFile a(fs, 8000);
  std::vector<WantedRange> wanted;
  for (int64_t i = 0; i < 100; ++i) wanted.push_back(a.range(79 * i, 79 * i + 10));
  std::atomic<int> consumed = 0;
  ASSERT_OK(make_stream(fs)->run(wanted, a.checker(wanted, consumed)));
  EXPECT_EQ(consumed, 100);
  EXPECT_EQ(fs.count(Operation::Kind::kRead), 1);
}

TEST(ReadStreamTest, WhatThePageCacheHoldsIsReadThroughItAndAllElseDirectly) {
  for (const bool resident : {true, false}) {
    MemoryFileSystem fs({.resident = resident});
    const OneFile a(fs, 100000);
    const std::vector<WantedRange> wanted = {a.range(5000, 9000), a.range(60000, 61000)};
    std::atomic<int> consumed = 0;
    ASSERT_OK(make_stream(fs)->run(wanted, a.checker(wanted, consumed)));
    EXPECT_EQ(fs.count(Operation::Kind::kRead), 2);
    for (const Operation& operation : fs.operations()) {
      const bool read = operation.kind == Operation::Kind::kRead;
      EXPECT_EQ(operation.direct, read && !resident);
    }
  }
}

TEST(ReadStreamTest, AlignedDestinationsAreReadInPlaceAndBufferedOnesAtAnyAddress) {
  ASSERT_OK_AND_ASSIGN(const Memory memory, HeapMemorySource().allocate(kInPlace + 4096));
  std::byte* aligned = memory.bytes().data();
  struct Case {
    int64_t alignment;
    int64_t begin;
    std::byte* destination;
    int64_t nbytes;
    bool in_place;
  };
  const Case cases[] = {
      {4096, 4096, aligned, kInPlace, true},         {4096, 4096, aligned + 8, kInPlace, false},
      {4096, 4104, aligned, kInPlace, false},        {4096, 4096, aligned, kInPlace + 8, false},
      {4096, 4096, aligned, kInPlace - 4096, false}, {1, 13, aligned + 1, kInPlace, true}};
  for (const Case& c : cases) {
    MemoryFileSystem fs({.alignment = c.alignment});
    const OneFile a(fs, 2 * kInPlace + 4096);
    const std::vector<WantedRange> wanted = {a.range(c.begin, c.begin + c.nbytes, c.destination)};
    int consumed = 0;
    ASSERT_OK(make_stream(fs, 1, 512 << 10)->run(wanted, [&](int64_t, Bytes bytes, Unpacking&) {
      EXPECT_EQ(bytes.data() == c.destination, c.in_place);
      EXPECT_EQ(std::memcmp(bytes.data(), a.text.data() + c.begin, bytes.size()), 0);
      EXPECT_EQ(ssize(bytes), c.nbytes);
      ++consumed;
      return ok_status();
    }));
    EXPECT_EQ(consumed, 1);
  }
}

// Ranges as large tensors want them, whose ends are not at blocks of checksums.
TEST(ReadStreamTest, AllRangesShareTheRequestsToAStore) {
  MemoryStoreFileSystem fs;
  const std::string text = random_text(20 << 20, 5);
  fs.store.set("a", text);
  const auto file = open_for_reading(fs, "a");
  std::vector<std::byte> tensors(text.size());
  const auto stream = make_stream(fs, 2, 4 << 20);
  std::vector<WantedRange> wanted;
  for (int64_t begin = 0; begin < ssize(text);) {
    const int64_t most = begin % 3 == 0 ? 4096 : stream->max_aligned_range_nbytes();
    const int64_t end = std::min(begin + most, ssize(text));
    wanted.push_back({file.get(), {begin, end}, tensors.data() + begin});
    begin = end;
  }
  ASSERT_OK(stream->run(wanted, [&](int64_t index, Bytes bytes, Unpacking&) {
    std::ranges::copy(bytes, wanted[static_cast<size_t>(index)].destination);
    return ok_status();
  }));
  EXPECT_TRUE(as_text(tensors) == text);
  EXPECT_EQ(fs.store.count(StoreCall::Kind::kGet), 7);  // Of 3 to 4 MiB.
}

TEST(ReadStreamTest, AsManyRequestsToAStoreAreInFlightAsThereAreBuffers) {
  MemoryStoreFileSystem fs;
  const std::string text = random_text(20 << 20, 5);
  fs.store.set("a", text);
  const auto file = open_for_reading(fs, "a");
  std::vector<WantedRange> wanted;
  for (int64_t begin = 0; begin < ssize(text); begin += 1 << 20) {
    wanted.push_back({file.get(), {begin, begin + (1 << 20)}});
  }
  fs.store.stall_transfers();
  std::thread reader([&] {
    EXPECT_OK(make_stream(fs, 2, 1 << 20)->run(wanted, [](int64_t, Bytes, Unpacking&) {
      return ok_status();
    }));
  });
  fs.store.wait_for_stalled(12);  // Two threads have six buffers each.
  fs.store.resume_transfers();
  reader.join();
}

// 100 ranges that share no read.
std::vector<WantedRange> far_apart(const OneFile& a) {
  std::vector<WantedRange> wanted;
  for (int64_t i = 0; i < 100; ++i) wanted.push_back(a.range(40000 * i, 40000 * i + 5000));
  return wanted;
}

TEST(ReadStreamTest, AFailedReadIsTheStatusAndTheStreamCanBeUsedAgain) {
  for (const int threads : {1, 3}) {
    MemoryFileSystem fs;
    const OneFile a(fs, 4000000);
    const std::vector<WantedRange> wanted = far_apart(a);
    const auto stream = make_stream(fs, threads);
    for (int64_t n = 0;; ++n) {
      SCOPED_TRACE("read " + std::to_string(n) + " fails");
      std::atomic<int> consumed = 0;
      fs.fail_operation(n, errno_status(EIO, "cannot go on"));
      const Status status = stream->run(wanted, a.checker(wanted, consumed));
      if (!fs.clear_fault()) {
        ASSERT_OK(status);
        EXPECT_EQ(consumed, 100);
        EXPECT_EQ(n, 100);
        break;
      }
      EXPECT_CODE(status, StatusCode::kStorage);
      EXPECT_LT(consumed, 100);
    }
  }
}

TEST(ReadStreamTest, AnErrorOfTheConsumerStopsTheReading) {
  MemoryFileSystem fs;
  const OneFile a(fs, 4000000);
  const std::vector<WantedRange> wanted = far_apart(a);
  int consumed = 0;
  const Status status = make_stream(fs)->run(wanted, [&](int64_t, Bytes, Unpacking&) {
    return ++consumed == 3 ? corruption("it is bad") : ok_status();
  });
  EXPECT_CODE(status, StatusCode::kCorruption);
  EXPECT_EQ(consumed, 3);
  EXPECT_LT(fs.count(Operation::Kind::kRead), 20);
}

TEST(ReadStreamTest, ACancelledRunReadsNoMoreAndNeitherDoesALaterOne) {
  for (const int threads : {1, 3}) {
    MemoryFileSystem fs;
    const OneFile a(fs, 4000000);
    const std::vector<WantedRange> wanted = far_apart(a);
    const auto stream = make_stream(fs, threads);
    std::atomic<int> consumed = 0;
    const auto consume = [&](int64_t, Bytes, Unpacking&) {
      if (++consumed == 3) stream->cancel();
      return ok_status();
    };
    EXPECT_CODE(stream->run(wanted, consume), StatusCode::kCancelled);
    const int64_t reads = fs.count(Operation::Kind::kRead);
    EXPECT_LT(reads, 3 + 6 * threads + threads);
    EXPECT_CODE(stream->run(wanted, consume), StatusCode::kCancelled);
    EXPECT_EQ(fs.count(Operation::Kind::kRead), reads);
  }
}

// A lack of memory on some thread is an error of this load, not the end of the process.
TEST(ReadStreamTest, AnExceptionOfTheConsumerBecomesAStatus) {
  for (const int threads : {1, 3}) {
    MemoryFileSystem fs;
    OneFile a(fs, 4000000);
    const auto stream = make_stream(fs, threads);
    const Status status = stream->run(far_apart(a), [](int64_t index, Bytes, Unpacking&) -> Status {
      if (index == 50) throw std::runtime_error("out of something");
      return ok_status();
    });
    a.file.reset();  // Nothing is in flight any more: the disk would see it.
    EXPECT_CODE(status, StatusCode::kInternal);
    EXPECT_THAT(status.message(), testing::HasSubstr("out of something"));
  }
}

TEST(ReadStreamTest, ARangeBeyondTheEndOfItsFileIsAnError) {
  MemoryFileSystem fs;
  const OneFile a(fs, 10000);
  const std::vector<WantedRange> wanted = {a.range(16384, 16385)};
  std::atomic<int> consumed = 0;
  EXPECT_CODE(make_stream(fs)->run(wanted, a.checker(wanted, consumed)), StatusCode::kCorruption);
  EXPECT_EQ(consumed, 0);
}

TEST(ReadStreamTest, BuffersTooSmallToReadThroughAreRefused) {
  MemoryFileSystem fs;
  EXPECT_CODE(ReadStream::make(fs, 1 << 20, 16383, 1), StatusCode::kInvalidArgument);
  EXPECT_CODE(ReadStream::make(fs, 16384, 16384, 1), StatusCode::kInvalidArgument);
  EXPECT_OK(ReadStream::make(fs, 32768, 16384, 8));
}

}  // namespace
}  // namespace torch_ckpt::read_stream_test
