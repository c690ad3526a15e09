// A saved file is read back by the parser of its frames, byte by byte, not by a load job.

#include "engine/save/save_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/crc.h"
#include "format/zip_frame.h"
#include "io/posix_file_system.h"
#include "support/memory_file_system.h"
#include "support/memory_object_store.h"
#include "support/read_file.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"
#include "support/tensor_digests.h"
#include "support/test_tensor.h"

namespace torch_ckpt::save_job_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kPath[] = "step-1/a.distcp";

// Views of every kind, most of them longer than one window.
std::vector<TestTensor> tensors_of_every_kind() {
  const auto image = TestTensor::random("image", DType::kBFloat16, {3, 17, 13, 40}, 2);
  const auto matrix = TestTensor::random("matrix", DType::kFloat32, {130, 210}, 3);
  return {
      TestTensor::random("contiguous", DType::kFloat32, {211, 97}, 1),
      TestTensor::random("scalar", DType::kFloat64, {}, 4),
      matrix.transposed(0, 1),
      matrix.narrowed({3, 5}, {100, 201}),
      image.transposed(1, 3),
      TestTensor::random("row", DType::kComplex128, {333}, 5).expanded(7),
      TestTensor::random("empty", DType::kFloat32, {0, 3}),
      TestTensor::random("mask", DType::kBool, {12345}, 6),
      TestTensor::random("hollow", DType::kInt64, {3, 0, 2}).transposed(0, 2),
      matrix.narrowed({0, 7}, {130, 1}),
      TestTensor::random("large", DType::kUInt8, {1100, 1000}, 7),
      TestTensor::random("in_place", DType::kUInt8, {1100, 1000}, 9).in_page(0),
      TestTensor::random("off_by_64", DType::kUInt8, {1100, 1000}, 10).in_page(64),
      TestTensor::random("large_strided", DType::kInt16, {1024, 600}, 8).transposed(0, 1),
  };
}

void expect_stored(std::string_view file, const Slice& slice, const TestTensor& tensor) {
  SCOPED_TRACE(tensor.live.name + " " + to_string(tensor.live.sizes));
  ASSERT_LE(slice.end(), static_cast<int64_t>(file.size()));
  const Bytes stored = torch_ckpt::slice(as_bytes(file), slice.offset, slice.total_nbytes());
  ASSERT_OK_AND_ASSIGN(const StoredTensor parsed, parse_frame(stored, stored, ssize(stored)));
  EXPECT_EQ(parsed.dtype, tensor.live.dtype);
  EXPECT_EQ(parsed.sizes, tensor.live.sizes);
  EXPECT_EQ(parsed.strides, contiguous_strides(tensor.live.sizes));
  EXPECT_EQ(parsed.storage_offset, 0);
  EXPECT_EQ(parsed.payload_offset, slice.nbytes.head);
  const Bytes payload = torch_ckpt::slice(stored, parsed.payload_offset, parsed.payload_nbytes);
  EXPECT_TRUE(as_text(payload) == tensor.packed());
  EXPECT_EQ(parsed.payload_crc, crc32(0, payload));
}

// Saves with windows of `block_nbytes`, and checks every byte of the file.
void expect_saves_every_kind(FileSystem& fs, const std::string& path, int64_t block_nbytes,
                             const SaveOptions& options, bool has_digests = false) {
  const std::vector<TestTensor> tensors = tensors_of_every_kind();
  const Layout layout = layout_of(tensors);
  const std::string object(30001, 'x');
  const auto pool = make_pool(8 * block_nbytes, block_nbytes);
  ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs, path, layout, *pool, options));
  for (size_t i = 0; i < tensors.size(); ++i) {
    Digest128 digest;
    ASSERT_OK(
        job->write(static_cast<int64_t>(i), tensors[i].live, has_digests ? &digest : nullptr));
    EXPECT_EQ(digest, has_digests ? full_digest_of(tensors[i]) : Digest128()) << i;
  }
  ASSERT_OK_AND_ASSIGN(const Slice appended, job->append(as_bytes(object)));
  ASSERT_OK(job->finish());
  job.reset();
  EXPECT_EQ(pool->free_count(), pool->block_count());

  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, read_file(fs, path));
  const std::string_view file = as_text(bytes);
  EXPECT_EQ(static_cast<int64_t>(file.size()), appended.end());
  int64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Slice& slice = layout.slices[i];
    expect_stored(file, slice, tensors[i]);
    for (; end < slice.offset; ++end) ASSERT_EQ(file[static_cast<size_t>(end)], '\0');
    end = slice.end();
  }
  EXPECT_EQ(appended.offset, align_up(end, kSmallAlignment));
  EXPECT_TRUE(file.substr(static_cast<size_t>(appended.offset)) == object);
}

class SaveJobTest : public testing::Test {
 protected:
  Result<std::unique_ptr<SaveJob>> start(const std::vector<TestTensor>& tensors) {
    return SaveJob::start(fs_, kPath, layout_of(tensors), *pool_, {});
  }

  MemoryFileSystem fs_;
  const std::unique_ptr<BufferPool> pool_ = make_pool(64 << 10, 8 << 10);
};

TEST_F(SaveJobTest, EveryKindOfTensorIsStoredAcrossWindowsOnAnyDisk) {
  const struct {
    MemoryOptions disk;
    int64_t block_nbytes;
    Caching caching;
  } cases[] = {
      {{.seed = 1}, 8 << 10, Caching::kDirect},       {{.seed = 2}, 8 << 10, Caching::kDirect},
      {{.seed = 3}, 8 << 10, Caching::kDirect},       {{}, 12 << 10, Caching::kBuffered},
      {{.alignment = 1}, 16 << 10, Caching::kDirect},
  };
  for (const auto& [disk, block_nbytes, caching] : cases) {
    SCOPED_TRACE(str_cat("alignment ", disk.alignment, ", seed ", disk.seed));
    MemoryFileSystem fs(disk);
    expect_saves_every_kind(fs, kPath, block_nbytes, {.caching = caching});
    expect_saves_every_kind(fs, "digested", block_nbytes, {.caching = caching}, true);
  }
}

TEST_F(SaveJobTest, EveryKindOfTensorIsStoredOnARealDisk) {
  TempDirectory directory;
  PosixFileSystem fs;
  expect_saves_every_kind(fs, directory.file("direct"), 8 << 10, {.caching = Caching::kDirect});
  expect_saves_every_kind(fs, directory.file("buffered"), 8 << 10, {.caching = Caching::kBuffered});
}

// Nothing is written from where it lies.
TEST_F(SaveJobTest, EveryKindOfTensorIsStoredInAStore) {
  MemoryStoreFileSystem fs;
  expect_saves_every_kind(fs, "a", 128 << 10, {});
  expect_saves_every_kind(fs, "digested", 128 << 10, {}, true);
}

// A digest covers one tensor, also where the one before has none, or failed to fit.
TEST_F(SaveJobTest, ADigestIsOfItsTensorAlone) {
  const std::vector<TestTensor> tensors = tensors_of_every_kind();
  ASSERT_OK_AND_ASSIGN(auto job, start(tensors));
  for (size_t i = 0; i < tensors.size(); ++i) {
    Digest128 digest;
    ASSERT_OK(job->write(static_cast<int64_t>(i), tensors[i].live, i % 3 ? &digest : nullptr));
    EXPECT_EQ(digest, i % 3 ? full_digest_of(tensors[i]) : Digest128()) << i;
  }
  ASSERT_OK(job->finish());
}

TEST_F(SaveJobTest, WhatLiesInMemoryAsInTheFileIsWrittenFromThere) {
  constexpr int64_t kBlock = 64 << 10;
  for (const int64_t offset : {0, 64}) {
    MemoryFileSystem fs;
    const TestTensor tensor =
        TestTensor::random("a", DType::kUInt8, {(1100 << 10) + 7}, 1).in_page(offset);
    const Layout layout = layout_of({tensor});
    const Slice& slice = layout.slices.front();
    const int64_t payload = slice.offset + slice.nbytes.head;
    const auto pool = make_pool(4 * kBlock, kBlock);
    ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs, kPath, layout, *pool, {}));
    ASSERT_OK(job->write(0, tensor.live));
    ASSERT_OK(job->settle());
    const std::string expected = tensor.packed();
    std::ranges::fill(*tensor.memory, std::byte{1});  // Nobody reads it any more.
    ASSERT_OK(job->finish());
    ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> file, read_file(fs, kPath));
    EXPECT_TRUE(as_text(torch_ckpt::slice(file, payload, slice.nbytes.payload)) == expected);
    const auto begins_there = [&](const Operation& operation) {
      return operation.kind == Operation::Kind::kWrite && operation.offset == payload;
    };
    EXPECT_EQ(std::ranges::any_of(fs.operations(), begins_there), offset == 0);
  }
}

TEST_F(SaveJobTest, SlicesPassedOverStayZero) {
  const std::vector<TestTensor> tensors = {
      TestTensor::random("a", DType::kFloat32, {5000}, 1),
      TestTensor::random("b", DType::kFloat32, {20000}, 2),
      TestTensor::random("c", DType::kFloat32, {50}, 3),
      TestTensor::random("d", DType::kFloat32, {5000}, 4),
  };
  const Layout layout = layout_of(tensors);
  {
    // What is in the blocks from before must not show through.
    for (int i = 0; i < pool_->block_count(); ++i) {
      std::ranges::fill(pool_->block(i), std::byte{0xAA});
    }
    ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs_, kPath, layout, *pool_, {}));
    ASSERT_OK(job->write(0, tensors[0].live));
    ASSERT_OK(job->write(2, tensors[2].live));
    ASSERT_OK(job->finish());
  }
  const std::string file = *fs_.contents(kPath);
  ASSERT_EQ(static_cast<int64_t>(file.size()), layout.nbytes);
  expect_stored(file, layout.slices[0], tensors[0]);
  expect_stored(file, layout.slices[2], tensors[2]);
  for (const size_t i : {1u, 3u}) {
    const Slice& slice = layout.slices[i];
    EXPECT_EQ(
        file.substr(static_cast<size_t>(slice.offset), static_cast<size_t>(slice.total_nbytes())),
        std::string(static_cast<size_t>(slice.total_nbytes()), '\0'));
  }
}

TEST_F(SaveJobTest, AppendedBytesLieBehindOneAnotherAligned) {
  ASSERT_OK_AND_ASSIGN(auto job, start({}));
  const std::vector<std::string> objects = {"first", "", std::string(1 << 20, 'y'), "last"};
  std::vector<Slice> slices;
  for (const std::string& object : objects) {
    ASSERT_OK_AND_ASSIGN(const Slice slice, job->append(as_bytes(object)));
    slices.push_back(slice);
  }
  ASSERT_OK(job->finish());
  const std::string file = *fs_.contents(kPath);
  EXPECT_EQ(slices[2].offset % kLargeAlignment, 0);
  EXPECT_EQ(static_cast<int64_t>(file.size()), slices.back().end());
  for (size_t i = 0; i < objects.size(); ++i) {
    EXPECT_EQ(slices[i].offset % kSmallAlignment, 0);
    EXPECT_TRUE(file.substr(static_cast<size_t>(slices[i].offset), objects[i].size()) ==
                objects[i]);
  }
}

// A power cut after finish() must find the bytes, the length and the name.
TEST_F(SaveJobTest, FinishSyncsAfterTheLastChange) {
  ASSERT_OK(save_tensors(fs_, kPath, tensors_of_every_kind(), *pool_, {}));
  const std::vector<Operation> operations = fs_.operations();
  ASSERT_GE(operations.size(), 2u);
  EXPECT_EQ(operations[operations.size() - 2].kind, Operation::Kind::kTruncate);
  EXPECT_EQ(operations.back().kind, Operation::Kind::kSync);
  EXPECT_EQ(fs_.count(Operation::Kind::kSync), 1);
}

TEST_F(SaveJobTest, WithoutSyncNothingIsSynced) {
  ASSERT_OK(save_tensors(fs_, kPath, tensors_of_every_kind(), *pool_, {.sync = false}));
  EXPECT_EQ(fs_.count(Operation::Kind::kSync), 0);
  EXPECT_EQ(fs_.count(Operation::Kind::kSyncDirectory), 0);
}

// Two saves through one writer at a time: the second must not take blocks that the first counts on.
TEST_F(SaveJobTest, APoolServesOneJobAtATime) {
  {
    ASSERT_OK_AND_ASSIGN(const auto first, SaveJob::start(fs_, "first", {}, *pool_, {}));
    EXPECT_EQ(SaveJob::start(fs_, "second", {}, *pool_, {}).status().code(),
              StatusCode::kInvalidArgument);
    ASSERT_OK(first->finish());
    EXPECT_EQ(fs_.contents("first"), "");
    ASSERT_OK_AND_ASSIGN(const auto third, SaveJob::start(fs_, "third", {}, *pool_, {}));
    third->abort();
  }
  ASSERT_OK_AND_ASSIGN(const auto last, SaveJob::start(fs_, "last", {}, *pool_, {}));
}

TEST_F(SaveJobTest, RoomForTheWholeLayoutIsReservedBeforeTheFirstWrite) {
  const Layout layout = layout_of(tensors_of_every_kind());
  ASSERT_OK_AND_ASSIGN(const auto job, SaveJob::start(fs_, kPath, layout, *pool_, {}));
  ASSERT_EQ(fs_.count(Operation::Kind::kPreallocate), 1);
  EXPECT_EQ(fs_.operations().back().nbytes, layout.nbytes);
}

// Whichever operation fails: an error that says so, no half file, and every buffer back.
TEST_F(SaveJobTest, AnyFailedOperationLeavesNoFileAndFreesEveryBlock) {
  const std::vector<TestTensor> tensors = {
      TestTensor::random("a", DType::kFloat32, {211, 97}, 1),
      TestTensor::random("b", DType::kFloat32, {130, 60}, 2).transposed(0, 1),
  };
  for (int64_t n = 0;; ++n) {
    SCOPED_TRACE("operation " + std::to_string(n) + " fails");
    MemoryFileSystem fs({.seed = static_cast<uint32_t>(n)});
    fs.fail_operation(n, errno_status(ENOSPC, "cannot go on"));
    const Status status = save_tensors(fs, kPath, tensors, *pool_, {});
    EXPECT_EQ(pool_->free_count(), pool_->block_count());
    if (!fs.clear_fault()) {
      ASSERT_OK(status);
      EXPECT_THAT(fs.paths(), ElementsAre(kPath));
      EXPECT_GT(n, 15);  // The fault has been everywhere.
      return;
    }
    EXPECT_CODE(status, StatusCode::kStorage);
    EXPECT_EQ(status.error_number(), ENOSPC);
    EXPECT_THAT(fs.paths(), IsEmpty());
  }
}

TEST_F(SaveJobTest, AfterAnErrorEveryCallFailsWithIt) {
  const auto a = TestTensor::random("a", DType::kUInt8, {100000});
  ASSERT_OK_AND_ASSIGN(auto job, start({a, a}));
  fs_.fail_operation(2, errno_status(EIO, "the disk is gone"));
  EXPECT_CODE(job->write(0, a.live), StatusCode::kStorage);
  EXPECT_THAT(job->write(1, a.live).message(), HasSubstr("the disk is gone"));
  EXPECT_THAT(job->append(as_bytes("x")).status().message(), HasSubstr("the disk is gone"));
  EXPECT_THAT(job->finish().message(), HasSubstr("the disk is gone"));
}

TEST_F(SaveJobTest, ACancelledJobWritesNoMoreAndFreesEveryBlock) {
  const auto a = TestTensor::random("a", DType::kUInt8, {100000});
  {
    ASSERT_OK_AND_ASSIGN(auto job, start({a, a}));
    ASSERT_OK(job->write(0, a.live));
    job->cancel();
    const int64_t writes = fs_.count(Operation::Kind::kWrite);
    EXPECT_CODE(job->write(1, a.live), StatusCode::kCancelled);
    EXPECT_CODE(job->append(as_bytes("x")).status(), StatusCode::kCancelled);
    EXPECT_CODE(job->finish(), StatusCode::kCancelled);
    EXPECT_EQ(fs_.count(Operation::Kind::kWrite), writes);
  }
  EXPECT_THAT(fs_.paths(), IsEmpty());
  EXPECT_EQ(pool_->free_count(), pool_->block_count());
}

TEST_F(SaveJobTest, AJobThatIsNotFinishedRemovesItsFile) {
  const auto a = TestTensor::random("a", DType::kUInt8, {100000});
  {
    ASSERT_OK_AND_ASSIGN(auto job, start({a}));
    ASSERT_OK(job->write(0, a.live));
    EXPECT_THAT(fs_.paths(), ElementsAre(kPath));
  }
  EXPECT_THAT(fs_.paths(), IsEmpty());
  EXPECT_EQ(pool_->free_count(), pool_->block_count());
}

TEST_F(SaveJobTest, AFileThatExistsIsNeitherReplacedNorRemoved) {
  fs_.put(kPath, "committed");
  const auto job = start({});
  EXPECT_CODE(job, StatusCode::kStorage);
  EXPECT_EQ(job.status().error_number(), EEXIST);
  EXPECT_EQ(fs_.contents(kPath), "committed");
}

TEST_F(SaveJobTest, ATensorThatDoesNotFitItsSliceIsRefused) {
  const auto laid_out = TestTensor::random("a", DType::kFloat32, {10, 20});
  const std::vector<TestTensor> others = {
      TestTensor::random("longer", DType::kFloat32, {10, 21}),
      TestTensor::random("shorter", DType::kFloat32, {9, 20}),
      TestTensor::random("other itemsize", DType::kInt16, {10, 20}),
  };
  for (const TestTensor& other : others) {
    ASSERT_OK_AND_ASSIGN(auto job, start({laid_out}));
    const Status status = job->write(0, other.live);
    EXPECT_CODE(status, StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(other.live.name));
  }
}

TEST_F(SaveJobTest, IndicesMustAscendWithinTheLayout) {
  const auto a = TestTensor::random("a", DType::kFloat32, {10});
  for (const int64_t second : {-1, 0, 1, 3}) {
    ASSERT_OK_AND_ASSIGN(const auto job, start({a, a, a}));
    ASSERT_OK(job->write(1, a.live));
    EXPECT_CODE(job->write(second, a.live), StatusCode::kInvalidArgument) << second;
  }
  ASSERT_OK_AND_ASSIGN(const auto job, start({a, a, a}));
  ASSERT_OK(job->append(as_bytes("x")));
  EXPECT_CODE(job->write(0, a.live), StatusCode::kInvalidArgument);
}

TEST_F(SaveJobTest, SizesThatNoTensorHasHaveNoSlice) {
  EXPECT_CODE(slice_nbytes(DType::kFloat32, {-1}), StatusCode::kInvalidArgument);
  EXPECT_CODE(slice_nbytes(DType::kFloat32, {INT64_MAX, 2}), StatusCode::kInvalidArgument);
}

TEST_F(SaveJobTest, TheModeSaysHowTheFileIsWritten) {
  ASSERT_OK_AND_ASSIGN(const auto a, start({}));
  a->abort();
  EXPECT_TRUE(a->mode().direct);
  EXPECT_EQ(a->mode().queue.name, "memory");
  MemoryFileSystem fallback({.alignment = 1});
  ASSERT_OK_AND_ASSIGN(const auto b, SaveJob::start(fallback, kPath, {}, *pool_, {}));
  EXPECT_FALSE(b->mode().direct);
  EXPECT_EQ(b->mode().reason, "memory");
}

}  // namespace
}  // namespace torch_ckpt::save_job_test
