// Ranks are jobs on one file, each of which writes in its turn. What they leave is compared with a
// file that was put together element by element.

#include "engine/save/shared_file_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "io/posix_file_system.h"
#include "support/memory_file_system.h"
#include "support/memory_object_store.h"
#include "support/read_file.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"
#include "support/test_tensor.h"

namespace torch_ckpt::shared_file_job_test {
namespace {

using ::testing::HasSubstr;

constexpr char kPath[] = "model/.part.tmp";
constexpr int64_t kBlock = 16 << 10;

// A box of a tensor, and where it goes.
struct Piece {
  BoxPlace place;
  TestTensor tensor;
};

// What all ranks write to one file, and what it holds then.
struct Work {
  std::vector<std::vector<Piece>> of_rank;
  std::string file;
};

// Values of a box as a tensor of its own: contiguous, or the transposition of one.
TestTensor copy_of(const TestTensor& box, bool transposed) {
  const size_t dims = box.live.sizes.size();
  Dims sizes = box.live.sizes;
  if (transposed) std::swap(sizes[0], sizes[dims - 1]);
  TestTensor copy = TestTensor::random(box.live.name, box.live.dtype, sizes);
  if (transposed) copy = copy.transposed(0, dims - 1);
  const auto size = static_cast<size_t>(itemsize(box.live.dtype));
  for_each_index(box.live.sizes, [&](const Dims& index) {
    std::memcpy(copy.live.data + dot(index, copy.live.strides),
                box.live.data + dot(index, box.live.strides), size);
  });
  return copy;
}

// Tensors one behind the other, each cut along some dimensions and its boxes dealt out.
Work random_work(uint32_t seed, size_t ranks) {
  std::mt19937 random(seed);
  Work work = {.of_rank = std::vector<std::vector<Piece>>(ranks), .file = std::string(100, 'h')};
  const DType dtypes[] = {DType::kFloat32, DType::kUInt8, DType::kBFloat16};
  for (int number = 0; number < 12; ++number) {
    Dims sizes;
    for (int64_t dims = pick(random, 4); dims > 0; --dims) sizes.push_back(1 + pick(random, 40));
    if (number % 4 == 0) sizes = {64 + pick(random, 100), 200 + pick(random, 400)};
    const auto whole = TestTensor::random("t" + std::to_string(number), dtypes[pick(random, 3)],
                                          sizes, seed + static_cast<uint32_t>(number));
    Dims cuts(sizes.size(), 1);
    for (size_t d = 0; d < sizes.size(); ++d)
      cuts[d] = 1 + pick(random, std::min<int64_t>(4, sizes[d]));
    for_each_index(cuts, [&](const Dims& index) {
      Piece piece = {{static_cast<int64_t>(work.file.size()), sizes, Dims(sizes.size())}, {}};
      Dims box(sizes.size());
      for (size_t d = 0; d < sizes.size(); ++d) {
        piece.place.box_offsets[d] = index[d] * sizes[d] / cuts[d];
        box[d] = (index[d] + 1) * sizes[d] / cuts[d] - piece.place.box_offsets[d];
      }
      piece.tensor = copy_of(whole.narrowed(piece.place.box_offsets, box),
                             !sizes.empty() && pick(random, 3) == 0);
      work.of_rank[static_cast<size_t>(pick(random, std::ssize(work.of_rank)))].push_back(piece);
    });
    work.file += whole.packed();
  }
  return work;
}

// All ranks write, one piece each in turn.
void write_in_turn(FileSystem& fs, const std::string& path, const Work& work,
                   const SaveOptions& options) {
  const auto nbytes = static_cast<int64_t>(work.file.size());
  std::vector<std::unique_ptr<BufferPool>> pools;
  std::vector<std::unique_ptr<SharedFileJob>> jobs;
  size_t most = 0;
  ASSERT_OK(write_file(fs, path, {}, false));
  for (const auto& pieces : work.of_rank) {
    pools.push_back(make_pool(4 * kBlock, kBlock));
    ASSERT_OK_AND_ASSIGN(auto job, SharedFileJob::start(fs, path, nbytes, *pools.back(), options));
    jobs.push_back(std::move(job));
    most = std::max(most, pieces.size());
  }
  ASSERT_OK(jobs[0]->put(0, as_bytes(work.file).subspan(0, 100)));
  for (size_t turn = 0; turn < most; ++turn) {
    for (size_t rank = 0; rank < jobs.size(); ++rank) {
      if (turn >= work.of_rank[rank].size()) continue;
      const Piece& piece = work.of_rank[rank][turn];
      ASSERT_OK(jobs[rank]->write(piece.place, piece.tensor.live));
    }
  }
  for (const auto& job : jobs) ASSERT_OK(job->finish());
  jobs.clear();
  for (const auto& pool : pools) EXPECT_EQ(pool->free_count(), pool->block_count());
}

TEST(SharedFileJobTest, RanksLeaveTheFileThatOneWouldHaveWritten) {
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Work work = random_work(seed, 1 + seed % 4);
    MemoryFileSystem fs({.alignment = seed % 5 == 0 ? 1 : 4096, .seed = seed});
    write_in_turn(fs, kPath, work, {});
    EXPECT_TRUE(fs.contents(kPath) == work.file);
  }
}

TEST(SharedFileJobTest, RanksLeaveTheSameFileOnARealDisk) {
  TempDirectory directory;
  PosixFileSystem fs;
  for (const Caching caching : {Caching::kDirect, Caching::kBuffered}) {
    const Work work = random_work(7, 3);
    const std::string path = directory.file(caching == Caching::kDirect ? "direct" : "buffered");
    write_in_turn(fs, path, work, {.caching = caching});
    ASSERT_OK_AND_ASSIGN(const auto bytes, read_file(fs, path));
    EXPECT_TRUE(as_text(bytes) == work.file);
  }
}

// Else the write that comes last would undo, in the rest of the page, what another rank has done.
TEST(SharedFileJobTest, NoPageIsWrittenBothThroughThePageCacheAndPastIt) {
  int64_t direct = 0;
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    MemoryFileSystem fs;
    write_in_turn(fs, kPath, random_work(seed, 3), {});
    std::map<int64_t, int> writes_past, writes_through;  // By page.
    for (const Operation& operation : fs.operations()) {
      if (operation.kind != Operation::Kind::kWrite || operation.nbytes == 0) continue;
      auto& writes = operation.direct ? writes_past : writes_through;
      const int64_t last = (operation.offset + operation.nbytes - 1) / 4096;
      for (int64_t page = operation.offset / 4096; page <= last; ++page) ++writes[page];
    }
    for (const auto& [page, count] : writes_past) {
      EXPECT_EQ(count, 1) << "page " << page;
      EXPECT_FALSE(writes_through.contains(page)) << "page " << page;
    }
    direct += std::ssize(writes_past);
  }
  EXPECT_GT(direct, 0) << "nothing went past the page cache: nothing was tested";
}

TEST(SharedFileJobTest, AnyOperationThatFailsFailsTheJobAndLeavesTheBuffers) {
  const Work work = random_work(3, 1);
  const auto pool = make_pool(4 * kBlock, kBlock);
  const auto save = [&](FileSystem& fs) -> Status {
    ASSIGN_OR_RETURN(const auto job,
                     SharedFileJob::start(fs, kPath, std::ssize(work.file), *pool, {}));
    for (const Piece& piece : work.of_rank[0]) {
      RETURN_IF_ERROR(job->write(piece.place, piece.tensor.live));
    }
    return job->finish();
  };
  MemoryFileSystem whole;
  whole.put(kPath, "");
  ASSERT_OK(save(whole));
  for (int64_t fault = 0; fault < std::ssize(whole.operations()); ++fault) {
    MemoryFileSystem fs;
    fs.put(kPath, "");
    fs.fail_operation(fault, errno_status(ENOSPC, "a test"));
    const Status status = save(fs);
    EXPECT_EQ(status.error_number(), ENOSPC) << "operation " << fault;
    EXPECT_EQ(pool->free_count(), pool->block_count());
  }
  EXPECT_GT(std::ssize(whole.operations()), 10);
}

TEST(SharedFileJobTest, ABoxOutsideOfItsTensorOrTheFileIsRefused) {
  MemoryFileSystem fs;
  fs.put(kPath, "");
  const auto pool = make_pool(4 * kBlock, kBlock);
  const auto tensor = TestTensor::random("t", DType::kFloat32, {2, 3});
  const BoxPlace bad[] = {{0, {2, 3}, {0, 1}},  {0, {2, 3}, {-1, 0}},
                          {0, {2}, {0}},        {-4, {2, 3}, {0, 0}},
                          {80, {2, 3}, {0, 0}}, {0, {int64_t{1} << 40, int64_t{1} << 40}, {0, 0}}};
  for (const BoxPlace& place : bad) {
    ASSERT_OK_AND_ASSIGN(const auto job, SharedFileJob::start(fs, kPath, 100, *pool, {}));
    const Status status = job->write(place, tensor.live);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("cannot write 't' at"));
  }
}

// Tensors in the order of the file, some of them transposed.
std::vector<Piece> whole_tensors(const std::vector<int64_t>& rows, std::string* file) {
  std::vector<Piece> pieces;
  *file = std::string(100, 'h');
  for (const int64_t count : rows) {
    const auto seed = static_cast<uint32_t>(pieces.size()) + 1;
    TestTensor tensor = TestTensor::random("t", DType::kInt16, {count, 320}, seed);
    if (seed % 2 == 0) tensor = tensor.transposed(0, 1);
    const Dims sizes = tensor.live.sizes;
    pieces.push_back({{static_cast<int64_t>(file->size()), sizes, Dims(2)}, tensor});
    *file += tensor.packed();
  }
  return pieces;
}

TEST(SharedFileJobTest, OnAStoreAFileIsOneStreamThatAppearsAtItsEnd) {
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{}, {0, 7, 0}, {3, 20'000, 1, 15'000, 4}}) {
    std::string file;
    const auto pieces = whole_tensors(rows, &file);
    for (const int64_t blocks : {2, 5}) {
      MemoryStoreFileSystem fs;
      const auto nbytes = static_cast<int64_t>(file.size());
      const int64_t block = int64_t{1} << 20;
      const auto pool = make_pool(blocks * block, block);
      ASSERT_OK_AND_ASSIGN(auto job, SharedFileJob::start(fs, "bucket/model", nbytes, *pool, {}));
      ASSERT_OK(job->put(0, as_bytes(file).subspan(0, 100)));
      for (const Piece& piece : pieces) ASSERT_OK(job->write(piece.place, piece.tensor.live));
      EXPECT_EQ(read_file(fs, "bucket/model").status().code(), StatusCode::kNotFound);
      ASSERT_OK(job->finish());
      ASSERT_OK_AND_ASSIGN(const auto found, read_file(fs, "bucket/model"));
      EXPECT_TRUE(std::ranges::equal(found, as_bytes(file)));
      EXPECT_EQ(pool->free_count(), pool->block_count());
    }
  }
}

TEST(SharedFileJobTest, AStreamThatIsOutOfOrderOrTooShortLeavesNoFile) {
  std::string file;
  const auto pieces = whole_tensors({7, 7}, &file);
  const auto nbytes = static_cast<int64_t>(file.size());
  for (const bool is_too_short : {false, true}) {
    MemoryStoreFileSystem fs;
    const auto pool = make_pool(4 * kBlock, kBlock);
    ASSERT_OK_AND_ASSIGN(auto job, SharedFileJob::start(fs, "bucket/model", nbytes, *pool, {}));
    ASSERT_OK(job->put(0, as_bytes(file).subspan(0, 100)));
    const Piece& piece = pieces[is_too_short ? 0 : 1];
    const Status written = job->write(piece.place, piece.tensor.live);
    const Status status = is_too_short ? job->finish() : written;
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.message();
    job.reset();
    EXPECT_EQ(read_file(fs, "bucket/model").status().code(), StatusCode::kNotFound);
    EXPECT_EQ(pool->free_count(), pool->block_count());
  }
}

}  // namespace
}  // namespace torch_ckpt::shared_file_job_test
