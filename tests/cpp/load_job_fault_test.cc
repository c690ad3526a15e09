// Loading from disks and metadata that are broken, missing or hostile.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "engine/load/load_job.h"
#include "support/memory_file_system.h"
#include "support/saved_checkpoint.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::load_job_fault_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(LoadJobFaultTest, AMissingFileIsNotFoundBeforeAnythingIsWritten) {
  MemoryFileSystem fs;
  const auto saved = TestTensor::random("w", DType::kFloat32, {10}, 1);
  const auto loaded = TestTensor::random("w", DType::kFloat32, {10}, 2);
  const std::string before = loaded.packed();
  const StoredSlice slice = save_file(fs, "a", {saved})[0];
  StoredSlice missing = slice;
  missing.file = "b";
  const auto result = load(fs, {whole(slice, loaded), whole(missing, loaded)});
  EXPECT_CODE(result, StatusCode::kNotFound);
  EXPECT_THAT(result.status().message(), AllOf(HasSubstr("'w'"), HasSubstr("step-1/b")));
  EXPECT_EQ(loaded.packed(), before);
}

TEST(LoadJobFaultTest, ASliceThatItsFileDoesNotHoldIsCorrupt) {
  const auto saved = TestTensor::random("w", DType::kFloat32, {10}, 1);
  for (const bool raw : {false, true}) {
    MemoryFileSystem fs;
    const StoredSlice sound = save_file(fs, "a", {saved})[0];
    const StoredSlice broken[] = {{"a", sound.offset + 1, sound.nbytes, "w"},
                                  {"a", sound.offset, sound.nbytes + 1, "w"},
                                  {"a", -1, 10, "w"},
                                  {"a", 0, -1, "w"},
                                  {"a", INT64_MAX, INT64_MAX, "w"},
                                  {"a", 1, INT64_MAX, "w"}};
    for (const StoredSlice& slice : broken) {
      const auto result = raw ? load(fs, {}, {slice}) : load(fs, {whole(slice, saved)});
      EXPECT_CODE(result, StatusCode::kCorruption);
      EXPECT_THAT(result.status().message(), HasSubstr("'w'"));
    }
    EXPECT_EQ(fs.count(Operation::Kind::kRead), 0);
  }
}

// Metadata that names files elsewhere must not make a load open them.
TEST(LoadJobFaultTest, NamesThatLeaveTheCheckpointAreRefusedUnopened) {
  MemoryFileSystem fs;
  const auto loaded = TestTensor::random("w", DType::kFloat32, {10});
  for (const std::string file : {"../x", "/etc/passwd", "a/../../x", "a/..", "..", ""}) {
    const StoredSlice slice = {file, 0, 100, "w"};
    EXPECT_CODE(load(fs, {whole(slice, loaded)}), StatusCode::kCorruption) << file;
    EXPECT_CODE(load(fs, {}, {slice}), StatusCode::kCorruption) << file;
  }
  EXPECT_TRUE(fs.operations().empty());
}

TEST(LoadJobFaultTest, NamesWithDotsAreOrdinary) {
  MemoryFileSystem fs;
  const auto saved = TestTensor::random("w", DType::kFloat32, {10});
  for (const std::string file : {"..a", "b..", "c/...", "__0_0.distcp"}) {
    const StoredSlice slice = save_file(fs, file, {saved})[0];
    EXPECT_OK(load(fs, {whole(slice, saved)})) << file;
  }
}

TEST(LoadJobFaultTest, ThousandsOfFilesAreNotAllOpenAtOnce) {
  MemoryFileSystem fs;
  std::vector<TestTensor> saved;
  std::vector<TestTensor> loaded;
  std::vector<TensorRequest> requests;
  for (uint32_t i = 0; i < 300; ++i) {
    saved.push_back(TestTensor::random("w", DType::kUInt8, {i % 7 == 0 ? 140000 : 100}, i));
    loaded.push_back(TestTensor::random("w", DType::kUInt8, saved[i].live.sizes, i + 1000));
    const StoredSlice slice = save_file(fs, std::to_string(i), {saved[i]})[0];
    requests.push_back(whole(slice, loaded[i]));
  }
  std::vector<StoredSlice> slices;
  for (const TensorRequest& request : requests) slices.push_back(request.slice);
  ASSERT_OK_AND_ASSIGN(auto job, LoadJob::make(fs, "step-1", {}));
  ASSERT_OK(job->wanted(requests).status());
  ASSERT_OK(job->check(slices));
  ASSERT_OK(job->run(requests, {}).status());
  for (size_t i = 0; i < saved.size(); ++i) ASSERT_TRUE(loaded[i].packed() == saved[i].packed());
  EXPECT_LE(fs.most_open_files(), 128);
}

TEST(LoadJobFaultTest, EachFileIsOpenedOnceInALoad) {
  MemoryFileSystem fs;
  std::vector<TensorRequest> requests;
  std::vector<StoredSlice> slices;
  const auto loaded = TestTensor::random("w", DType::kUInt8, {140000}, 1);
  for (const std::string file : {"a", "b", "c"}) {
    slices.push_back(save_file(fs, file, {loaded})[0]);
    requests.push_back(whole(slices.back(), loaded));
  }
  const int64_t before = fs.count(Operation::Kind::kOpen);
  ASSERT_OK_AND_ASSIGN(auto job, LoadJob::make(fs, "step-1", {}));
  ASSERT_OK(job->wanted(requests).status());
  ASSERT_OK(job->check(slices));
  for (const TensorRequest& request : requests) ASSERT_OK(job->run({&request, 1}, {}).status());
  ASSERT_OK(job->run({}, slices).status());
  EXPECT_EQ(fs.count(Operation::Kind::kOpen) - before, 3);
}

// Whichever operation fails, the load says so; and the job serves the next load.
TEST(LoadJobFaultTest, AnyFailedOperationIsTheStatusAndTheJobCanBeUsedAgain) {
  MemoryFileSystem fs;
  const auto small = TestTensor::random("small", DType::kFloat32, {50, 20}, 1);
  const auto large = TestTensor::random("large", DType::kFloat32, {300, 130}, 2);
  const std::vector<StoredSlice> a = save_file(fs, "a", {small, large});
  const std::vector<StoredSlice> b = save_file(fs, "b", {small});
  const auto to_small = TestTensor::random("small", DType::kFloat32, {50, 20}, 3);
  const auto to_large = TestTensor::random("large", DType::kFloat32, {300, 130}, 4);
  const std::vector<TensorRequest> requests = {whole(a[0], to_small), whole(a[1], to_large)};
  ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(fs, kCheckpoint, tiny()));
  for (int64_t n = 0;; ++n) {
    SCOPED_TRACE("operation " + std::to_string(n) + " fails");
    fs.fail_operation(n, errno_status(EIO, "cannot go on"));
    const auto result = job->run(requests, b);
    if (!fs.clear_fault()) {
      ASSERT_OK(result);
      EXPECT_GT(n, 20);  // The fault has been everywhere.
      break;
    }
    EXPECT_CODE(result, StatusCode::kStorage);
    EXPECT_EQ(result.status().error_number(), EIO);
  }
  EXPECT_TRUE(to_small.packed() == small.packed());
  EXPECT_TRUE(to_large.packed() == large.packed());
}

TEST(LoadJobFaultTest, BuffersTooSmallToReadThroughAreRefused) {
  MemoryFileSystem fs;
  EXPECT_CODE(LoadJob::make(fs, kCheckpoint, {.buffer_nbytes = 1 << 20, .block_nbytes = 4096}),
              StatusCode::kInvalidArgument);
  EXPECT_CODE(LoadJob::make(fs, kCheckpoint, {.buffer_nbytes = 0}), StatusCode::kInvalidArgument);
}

TEST(LoadJobFaultTest, NothingWantedOpensNothing) {
  MemoryFileSystem fs;
  ASSERT_OK(load(fs, {}));
  EXPECT_TRUE(fs.operations().empty());
}

}  // namespace
}  // namespace torch_ckpt::load_job_fault_test
