// Loading a checkpoint that has an index: everything that is read is checked by blocks, and nothing
// is learnt from frames. Blocks and buffers are small, so that every edge is met.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "engine/load/load_job.h"
#include "support/indexed_checkpoint.h"
#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/saved_checkpoint.h"
#include "support/status_matchers.h"
#include "support/strided_frame.h"
#include "support/test_tensor.h"

namespace torch_ckpt::indexed_load_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kBlock = kSumBlock;

TEST(IndexedLoadTest, WholeTensorsAndObjectsComeBack) {
  for (const int64_t alignment : {1, 4096}) {
    for (const bool resident : {false, true}) {
      Indexed a({.alignment = alignment, .resident = resident});
      std::vector<TestTensor> loaded;
      std::vector<TensorRequest> requests;
      for (size_t i = 0; i < a.saved.size(); ++i) {
        loaded.push_back(a.destination(i));
        requests.push_back(whole(a.slices[i], loaded[i]));
      }
      ASSERT_OK_AND_ASSIGN(const LoadResult result, a.load(requests, {a.object}));
      EXPECT_THAT(result.outcomes, Each(Outcome::kLoaded));
      for (size_t i = 0; i < a.saved.size(); ++i) {
        EXPECT_TRUE(loaded[i].packed() == a.saved[i].packed()) << to_string(loaded[i].live.sizes);
      }
      const std::string file = *a.fs.contents("step-1/a");
      EXPECT_TRUE(as_text({result.bytes[0].data.get(), 50000}) ==
                  std::string_view(file).substr(static_cast<size_t>(a.object.offset), 50000));
    }
  }
}

TEST(IndexedLoadTest, LargeBuffersReadInPlace) {
  Indexed a;
  const TestTensor loaded = a.destination(3);
  ASSERT_OK(a.load({whole(a.slices[3], loaded)}, {},
                   {.buffer_nbytes = 4 << 20, .block_nbytes = 1 << 20, .threads = 1}));
  EXPECT_TRUE(loaded.packed() == a.saved[3].packed());
}

// Between the copy and the checksum, the bytes stay in the processor's cache.
TEST(IndexedLoadTest, CachedBytesAreVerifiedInPartsThatFitTheCache) {
  constexpr int64_t kPart = 512 << 10;
  constexpr size_t kLong = 9;
  const LoadOptions options = {.buffer_nbytes = 8 << 20, .block_nbytes = 4 << 20, .threads = 1};
  for (const int64_t alignment : {1, 4096}) {
    Indexed a({.alignment = alignment, .resident = true});
    const TestTensor loaded = a.destination(kLong);
    const auto before = std::ssize(a.fs.operations());
    ASSERT_OK(a.load({whole(a.slices[kLong], loaded)}, {}, options));
    EXPECT_TRUE(loaded.packed() == a.saved[kLong].packed());
    int64_t read_nbytes = 0;
    const std::vector<Operation> operations = a.fs.operations();
    for (auto one = operations.begin() + before; one != operations.end(); ++one) {
      if (one->kind != Operation::Kind::kRead) continue;
      EXPECT_LE(one->nbytes, kPart);
      read_nbytes += one->nbytes;
    }
    EXPECT_EQ(read_nbytes, align_up(ssize(loaded.packed()), kBlock));
    for (int64_t at = kBlock; at < ssize(loaded.packed()); at += kPart / 2 + 5 * kBlock) {
      flip_bit(a.fs, "a", a.slices[kLong].offset + at);
      const auto result = a.load({whole(a.slices[kLong], loaded)}, {}, options);
      EXPECT_CODE(result, StatusCode::kCorruption);
      const int64_t block = align_down(a.slices[kLong].offset + at, kBlock);
      EXPECT_THAT(result.status().message(),
                  AllOf(HasSubstr("'t9'"), HasSubstr(str_cat(" at ", block, " of step-1/a"))));
      flip_bit(a.fs, "a", a.slices[kLong].offset + at);
    }
  }
}

TEST(IndexedLoadTest, FramesAreNotAsked) {
  Indexed a;
  std::string contents = *a.fs.contents("step-1/a");
  // Every byte of the file but the payload wanted, in blocks of their own.
  const TestTensor loaded = a.destination(6);
  const int64_t begin = payload_offset(a.fs, a.slices[6]);
  const int64_t end = begin + 60000 * 2 * 4;
  for (int64_t at = 0; at < static_cast<int64_t>(contents.size()); ++at) {
    if (at < align_down(begin, kBlock) || at >= align_up(end, kBlock)) {
      contents[static_cast<size_t>(at)] = 'x';
    }
  }
  a.fs.put("step-1/a", contents);
  ASSERT_OK(a.load({whole(a.slices[6], loaded)}));
  EXPECT_TRUE(loaded.packed() == a.saved[6].packed());
}

// Flips bits anywhere and loads random boxes: either an error, or exactly the saved values.
TEST(IndexedLoadTest, NoDamagedByteIsEverLoaded) {
  Indexed a;
  const int64_t file_nbytes = static_cast<int64_t>(a.fs.contents("step-1/a")->size());
  int found = 0;
  int missed = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto i = static_cast<size_t>(pick(random, static_cast<int64_t>(a.saved.size())));
    Dims offsets;
    Dims sizes;
    for (const int64_t size : a.saved[i].live.sizes) {
      offsets.push_back(pick(random, size + 1));
      sizes.push_back(pick(random, size - offsets.back() + 1));
    }
    const TestTensor loaded = TestTensor::random("w", DType::kFloat32, sizes, seed);
    const int64_t at = pick(random, 2) == 0 ? pick(random, file_nbytes)
                                            : a.slices[i].offset + pick(random, a.slices[i].nbytes);
    flip_bit(a.fs, "a", at);
    const auto result = a.load({part(a.slices[i], offsets, loaded)});
    if (result.ok()) {
      ++missed;
      EXPECT_TRUE(loaded.packed() == a.saved[i].narrowed(offsets, sizes).packed());
    } else {
      ++found;
      EXPECT_CODE(result, StatusCode::kCorruption);
      EXPECT_THAT(result.status().message(),
                  AllOf(HasSubstr(a.saved[i].live.name), HasSubstr("step-1/a"),
                        HasSubstr(std::to_string(at / kBlock * kBlock))));
    }
    flip_bit(a.fs, "a", at);
  }
  EXPECT_GT(found, 50);
  EXPECT_GT(missed, 50);
}

TEST(IndexedLoadTest, AFlippedBitOfAnObjectIsFound) {
  Indexed a;
  for (int64_t at = 0; at < a.object.nbytes; at += 997) {
    flip_bit(a.fs, "a", a.object.offset + at);
    EXPECT_CODE(a.load({}, {a.object}), StatusCode::kCorruption);
    EXPECT_OK(a.load({}, {a.object}, Indexed::options(/*verify=*/false)));
    flip_bit(a.fs, "a", a.object.offset + at);
  }
}

TEST(IndexedLoadTest, WithoutEntriesFramesAreReadAndCheckedToo) {
  Indexed a;
  a.index->has_entries = false;
  a.index->entries.clear();
  for (size_t i = 0; i < a.saved.size(); ++i) {
    const TestTensor loaded = a.destination(i);
    ASSERT_OK(a.load({whole(a.slices[i], loaded)}));
    EXPECT_TRUE(loaded.packed() == a.saved[i].packed());
    // A field that no reader looks at: only the sums tell.
    const int64_t version_made_by = a.slices[i].offset + a.slices[i].nbytes - 22 - 60 + 4;
    flip_bit(a.fs, "a", version_made_by);
    const auto result = a.load({whole(a.slices[i], a.destination(i))});
    EXPECT_CODE(result, StatusCode::kCorruption);
    EXPECT_THAT(result.status().message(), HasSubstr(a.saved[i].live.name));
    flip_bit(a.fs, "a", version_made_by);
  }
}

// What must be read to check a head is longer than the head: it must fit a buffer as well.
TEST(IndexedLoadTest, HeadsThatDoNotFitABufferWithTheirBlocksAreLeftToTorch) {
  constexpr int64_t kLongBlock = 16 << 10;
  for (int64_t head = 20 << 10; head < 70 << 10; head += 3001) {
    const std::string payload(as_text(random_bytes(400000, 5)));
    const std::string extra(as_text(random_bytes(head, 6)));
    const std::string frame = strided_frame({100000}, {1}, 0, payload, extra);
    MemoryFileSystem fs;
    const std::string contents = std::string(kLongBlock - 1, 'x') + frame;
    fs.put("step-1/a", contents);
    BlockSummer summer(kLongBlock);
    summer.append(as_bytes(contents));
    const auto index = std::make_shared<Index>();
    index->save_id = "0123456789abcdef";
    index->files = {{"a", summer.finish()}};
    const TestTensor loaded = TestTensor::random("w", DType::kFloat32, {100000}, 100);
    const StoredSlice slice = {"a", kLongBlock - 1, static_cast<int64_t>(frame.size()), "w"};
    ASSERT_OK_AND_ASSIGN(
        const auto job,
        LoadJob::make(fs, kCheckpoint,
                      {.buffer_nbytes = 128 << 10, .block_nbytes = 4 * kLongBlock, .threads = 1},
                      opened(*index)));
    const TensorRequest request = whole(slice, loaded);
    ASSERT_OK_AND_ASSIGN(const LoadResult result, job->run({&request, 1}, {}));
    if (result.outcomes[0] == Outcome::kLoaded) {
      EXPECT_TRUE(loaded.packed() == payload);
    }
    EXPECT_EQ(result.outcomes[0] == Outcome::kLoaded, head < 33 << 10) << head;
  }
}

TEST(IndexedLoadTest, AFileOfAnotherLengthIsFoundBeforeAnythingIsWritten) {
  Indexed a;
  const std::string contents = *a.fs.contents("step-1/a");
  for (const std::string& other :
       {contents + "x", contents.substr(0, contents.size() - 1), std::string()}) {
    a.fs.put("step-1/a", other);
    const TestTensor loaded = a.destination(1);
    const std::string before = loaded.packed();
    const auto result = a.load({whole(a.slices[1], loaded)});
    EXPECT_CODE(result, StatusCode::kCorruption);
    EXPECT_THAT(result.status().message(),
                AllOf(HasSubstr("t1"), HasSubstr(std::to_string(other.size()))));
    EXPECT_TRUE(loaded.packed() == before);
  }
}

TEST(IndexedLoadTest, WhatTheIndexDoesNotKnowIsCorruptionBeforeAnythingIsWritten) {
  Indexed a;
  a.fs.put("step-1/b", *a.fs.contents("step-1/a"));
  const TestTensor loaded = a.destination(1);
  const std::string before = loaded.packed();
  for (const StoredSlice& odd :
       {StoredSlice{"b", a.slices[1].offset, a.slices[1].nbytes, "t1"},
        StoredSlice{"a", a.slices[1].offset + 64, a.slices[1].nbytes, "t1"},
        StoredSlice{"a", a.slices[1].offset, a.slices[1].nbytes - 1, "t1"}}) {
    EXPECT_CODE(a.load({whole(odd, loaded)}), StatusCode::kCorruption);
    EXPECT_TRUE(loaded.packed() == before);
  }
}

// The sums of a tensor are in two blocks of the index, of which the second is damaged.
TEST(IndexedLoadTest, ADamagedSumOfTheIndexIsFoundBeforeAnythingIsWritten) {
  Indexed a;
  for (IndexedEntry& entry : a.index->entries) {
    for (IndexedBox& box : entry.boxes) box.file = 1;
  }
  IndexedFile other{.name = "b"};
  other.sums.block_nbytes = kBlock;
  const auto with_sums_before = [&](int64_t count) {
    other.sums.sums.resize(static_cast<size_t>(count));
    other.sums.file_nbytes = count * kBlock;
    Index index = *a.index;
    index.files.insert(index.files.begin(), other);
    return written(index);
  };
  constexpr int64_t kFirst = 20000;
  index_records::Header header;
  std::memcpy(&header, with_sums_before(kFirst).data(), sizeof(header));
  // An edge in the middle of the tensor's sums.
  const int64_t in_tensor = kFirst + a.slices[6].offset / kBlock + 60;
  const int64_t edge = CheckedBlocks::kSumsInBlock;
  const auto before = static_cast<int64_t>(header.sections[index_records::kSumSection].offset -
                                           header.sections[0].offset) /
                      8;
  std::vector<std::byte> bytes = with_sums_before(kFirst + edge - (before + in_tensor) % edge);
  bytes.back() ^= std::byte{1};
  ASSERT_OK_AND_ASSIGN(const auto damaged, opened(bytes));
  ASSERT_OK_AND_ASSIGN(const auto job,
                       LoadJob::make(a.fs, kCheckpoint, Indexed::options(), damaged));
  const TestTensor loaded = a.destination(6);
  const std::string untouched = loaded.packed();
  const TensorRequest request = whole(a.slices[6], loaded);
  const auto result = job->run({&request, 1}, {});
  EXPECT_CODE(result, StatusCode::kCorruption);
  EXPECT_THAT(result.status().message(), HasSubstr(".index"));
  EXPECT_TRUE(loaded.packed() == untouched);
  // Without checking, no sum is asked for.
  ASSERT_OK_AND_ASSIGN(const auto unchecked,
                       LoadJob::make(a.fs, kCheckpoint, Indexed::options(false), damaged));
  EXPECT_OK(unchecked->run({&request, 1}, {}));
}

// Boxes of one tensor, asked for in any order.
TEST(IndexedLoadTest, ManyBoxesOfOneTensorAreFoundInAnyOrder) {
  Index index;
  index.save_id = "0123456789abcdef";
  index.has_entries = true;
  index.files = {{.name = "a"}};
  const auto frame = *TensorFrame::make(DType::kFloat32, Dims{1, 3});
  IndexedEntry entry{.fqn = "w", .is_tensor = true, .dtype = "float32", .sizes = {3000, 3}};
  for (int64_t i = 0; i < 3000; ++i) {
    entry.boxes.push_back({{i, 0}, {1, 3}, 0, i * frame.nbytes(), frame.nbytes(), true, {}});
  }
  index.files[0].sums.file_nbytes = 3000 * frame.nbytes();
  index.files[0].sums.sums.resize(static_cast<size_t>(
      BlockGrid::block_count(index.files[0].sums.file_nbytes, kSumBlockNbytes)));
  index.entries = {entry, {.fqn = "empty", .is_tensor = true, .dtype = "int8", .sizes = {0}}};
  IndexLookup lookup(opened(index));
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const int64_t i = pick(random, 3000);
    const StoredSlice slice = {"a", i * frame.nbytes(), frame.nbytes(), "w"};
    ASSERT_OK_AND_ASSIGN(const auto found, lookup.tensor(slice));
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->sizes, (Dims{1, 3}));
    StoredSlice odd = slice;
    odd.offset += 1;
    EXPECT_CODE(lookup.tensor(odd), StatusCode::kCorruption);
    odd = slice;
    (seed % 2 == 0 ? odd.name : odd.file) = "empty";
    if (seed % 100 >= 2) continue;
    EXPECT_CODE(lookup.tensor(odd), StatusCode::kCorruption);
  }
}

TEST(IndexedLoadTest, AnOpaqueTensorIsLeftToTorch) {
  Indexed a;
  a.index->entries[1].boxes[0].plain = false;
  a.index->entries[2].dtype = "bits16";
  const TestTensor first = a.destination(1);
  const TestTensor second = a.destination(2);
  ASSERT_OK_AND_ASSIGN(const LoadResult result,
                       a.load({whole(a.slices[1], first), whole(a.slices[2], second)}));
  EXPECT_THAT(result.outcomes, Each(Outcome::kNeedsTorch));
}

TEST(IndexedLoadTest, AnIndexWhoseDtypeDoesNotFitTheSliceIsCorruption) {
  Indexed a;
  a.index->entries[1].dtype = "float64";
  EXPECT_CODE(a.load({whole(a.slices[1], a.destination(1))}), StatusCode::kCorruption);
}

TEST(IndexedLoadTest, BuffersThatHoldNoBlocksAreRefused) {
  Indexed a;
  EXPECT_CODE(
      LoadJob::make(a.fs, kCheckpoint, {.buffer_nbytes = 1 << 20, .block_nbytes = 4 * kBlock - 1},
                    opened(*a.index)),
      StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt::indexed_load_test
