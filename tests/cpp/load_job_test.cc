// Loading what a SaveJob wrote, with buffers so small that every limit is met. Slices of up to
// 128 KiB (here, of 8 KiB: what a block takes) and longer ones take different ways through the job;
// most tests go both.

#include "engine/load/load_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "io/posix_file_system.h"
#include "support/later_device.h"
#include "support/memory_file_system.h"
#include "support/saved_checkpoint.h"
#include "support/status_matchers.h"
#include "support/strided_frame.h"
#include "support/temp_directory.h"
#include "support/test_tensor.h"

namespace torch_ckpt::load_job_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A small and a large tensor, saved in one file, with destinations of other contents.
struct SmallAndLarge {
  MemoryFileSystem fs;
  std::vector<TestTensor> saved = {
      TestTensor::random("small.weight", DType::kFloat32, {50, 20}, 1),
      TestTensor::random("large.weight", DType::kFloat32, {300, 400}, 2),
  };
  std::vector<TestTensor> loaded = {
      TestTensor::random("small.weight", DType::kFloat32, {50, 20}, 3),
      TestTensor::random("large.weight", DType::kFloat32, {300, 400}, 4),
  };
  std::vector<std::string> before = {loaded[0].packed(), loaded[1].packed()};
  std::vector<StoredSlice> slices;

  explicit SmallAndLarge(const MemoryOptions& options = {}) : fs(options) {
    slices = save_file(fs, "a.distcp", saved);
  }
  std::vector<TensorRequest> requests() const {
    return {whole(slices[0], loaded[0]), whole(slices[1], loaded[1])};
  }
  void expect_untouched() const {
    for (size_t i = 0; i < loaded.size(); ++i) {
      EXPECT_TRUE(loaded[i].packed() == before[i]) << loaded[i].live.name << " was written";
    }
  }
};

TEST(LoadJobTest, WholeTensorsComeBackOnAnyDiskWithAnyNumberOfThreads) {
  const std::vector<Dims> shapes = {{},      {0, 3},     {1},        {7, 5},      {32, 1000},
                                    {33000}, {300, 400}, {16, 1, 9}, {2, 150000}, {3, 0}};
  for (const int64_t alignment : {1, 4096}) {
    for (const bool resident : {false, true}) {
      for (const int threads : {1, 4}) {
        for (const int64_t block : {16 << 10, 300 << 10}) {
          MemoryFileSystem fs({.alignment = alignment, .resident = resident});
          std::vector<TestTensor> saved;
          std::vector<TestTensor> loaded;
          for (const Dims& sizes : shapes) {
            const auto seed = static_cast<uint32_t>(saved.size());
            const std::string name = "t" + std::to_string(seed);
            saved.push_back(TestTensor::random(name, DType::kFloat32, sizes, seed));
            loaded.push_back(TestTensor::random(name, DType::kFloat32, sizes, seed + 100));
          }
          const std::vector<StoredSlice> slices = save_file(fs, "a", saved);
          std::vector<TensorRequest> requests;
          for (size_t i = 0; i < saved.size(); ++i) requests.push_back(whole(slices[i], loaded[i]));
          ASSERT_OK_AND_ASSIGN(
              const LoadResult result,
              load(fs, requests, {},
                   {.buffer_nbytes = 8 * block, .block_nbytes = block, .threads = threads}));
          EXPECT_THAT(result.outcomes, Each(Outcome::kLoaded));
          for (size_t i = 0; i < saved.size(); ++i) {
            EXPECT_TRUE(loaded[i].packed() == saved[i].packed()) << to_string(shapes[i]);
          }
        }
      }
    }
  }
}

TEST(LoadJobTest, WholeTensorsComeBackFromARealDisk) {
  TempDirectory directory;
  PosixFileSystem fs;
  const auto saved = TestTensor::random("w", DType::kFloat64, {400, 500}, 1);
  const auto loaded = TestTensor::random("w", DType::kFloat64, {400, 500}, 2);
  const auto pool = make_pool(1 << 20, 64 << 10);
  ASSERT_OK(save_tensors(fs, directory.file("a"), {saved}, *pool, {}));
  const Slice slice = layout_of({saved}).slices[0];
  ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(fs, directory.path(), tiny()));
  const TensorRequest request = whole({"a", slice.offset, slice.total_nbytes(), "w"}, loaded);
  ASSERT_OK(job->run({&request, 1}, {}));
  EXPECT_TRUE(loaded.packed() == saved.packed());
}

// Every element of the box arrives, in its place, and no byte beside it changes.
TEST(LoadJobTest, RandomBoxesArriveInStridedDestinations) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Dims sizes = seed % 2 == 0 ? Dims{9, 11, 13} : Dims{20, 50, 60};
    const auto saved = TestTensor::random("w", DType::kFloat32, sizes, seed);
    MemoryFileSystem fs({.seed = seed});
    const StoredSlice slice = save_file(fs, "a", {saved})[0];

    std::vector<TensorRequest> requests;
    std::vector<TestTensor> destinations;
    std::vector<std::vector<std::byte>> expected;
    for (int i = 0; i < 4; ++i) {
      Dims offsets;
      Dims box;
      for (const int64_t size : sizes) {
        offsets.push_back(pick(random, size + 1));
        box.push_back(pick(random, size - offsets.back() + 1));
      }
      // A view into a larger tensor whose dimensions lie the other way round.
      const Dims around = {box[2] + 2, box[1] + 1, box[0] + 3};
      const auto view = TestTensor::random("w", DType::kFloat32, around, seed + 100)
                            .transposed(0, 2)
                            .narrowed({1, 1, 2}, box);
      std::vector<std::byte> memory = *view.memory;
      const TestTensor source = saved.narrowed(offsets, box);
      for_each_index(box, [&](const Dims& index) {
        std::memcpy(
            memory.data() + (view.live.data - view.memory->data()) + dot(index, view.live.strides),
            source.live.data + dot(index, source.live.strides), 4);
      });
      destinations.push_back(view);
      expected.push_back(std::move(memory));
      requests.push_back(part(slice, offsets, view));
    }
    ASSERT_OK(load(fs, requests));
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_TRUE(*destinations[i].memory == expected[i]) << to_string(requests[i].box);
    }
  }
}

TEST(LoadJobTest, StoredStridesAreFollowed) {
  for (const int64_t scale : {1, 100}) {  // Small, then large.
    const Dims sizes = {2, 30 * scale, 40};
    const Dims strides = {30 * scale * 40 + 7, 1, 30 * scale};
    const std::string payload(as_text(random_bytes(4 * (2 * 30 * scale * 40 + 20), 5)));
    MemoryFileSystem fs;
    const std::string frame = strided_frame(sizes, strides, 3, payload);
    fs.put("step-1/a", "gap" + frame);
    const auto loaded = TestTensor::random("w", DType::kFloat32, sizes, 6);
    ASSERT_OK(load(fs, {whole({"a", 3, static_cast<int64_t>(frame.size()), "w"}, loaded)}));
    std::string expected;
    for_each_index(sizes, [&](const Dims& index) {
      expected += payload.substr(static_cast<size_t>(4 * (3 + dot(index, strides))), 4);
    });
    EXPECT_TRUE(loaded.packed() == expected);
  }
}

// What unfold() makes: rows that share elements. They are read more than once, and sound.
TEST(LoadJobTest, RowsThatOverlapInTheStorageAreNotTakenForCorrupt) {
  const LaterDevice later;
  for (const int64_t half : {10, 24576}) {
    for (const bool on_device : {false, true}) {
      const std::string payload(as_text(random_bytes(4 * 3 * half, 5)));
      const std::string frame = strided_frame({2, 2 * half}, {half, 1}, 0, payload);
      MemoryFileSystem fs;
      fs.put("step-1/a", frame);
      const auto loaded = TestTensor::random("w", DType::kFloat32, {2, 2 * half}, 6);
      TensorRequest request = whole({"a", 0, static_cast<int64_t>(frame.size()), "w"}, loaded);
      if (on_device) request.live = later.holding(request.live);
      ASSERT_OK(load(fs, {request}));
      EXPECT_TRUE(loaded.packed() == payload.substr(0, static_cast<size_t>(8 * half)) +
                                         payload.substr(static_cast<size_t>(4 * half)));
    }
  }
}

TEST(LoadJobTest, RawSlicesComeBackAsTheyAre) {
  const SmallAndLarge a;
  std::vector<StoredSlice> wanted = a.slices;
  wanted.push_back({"a.distcp", 5, 0, "nothing"});
  wanted.push_back({"a.distcp", 4097, 1, "one"});
  MemoryFileSystem fs;
  const std::string file = *a.fs.contents("step-1/a.distcp");
  fs.put("step-1/a.distcp", file);
  ASSERT_OK_AND_ASSIGN(const LoadResult result, load(fs, {}, wanted));
  ASSERT_EQ(result.bytes.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const LoadedBytes& loaded = result.bytes[i];
    EXPECT_TRUE(
        as_text({loaded.data.get(), static_cast<size_t>(loaded.nbytes)}) ==
        file.substr(static_cast<size_t>(wanted[i].offset), static_cast<size_t>(wanted[i].nbytes)));
  }
}

TEST(LoadJobTest, AFlippedBitOfAPayloadIsFound) {
  for (const size_t i : {0u, 1u}) {
    SmallAndLarge a;
    SCOPED_TRACE(a.slices[i].name);
    for (const int64_t byte : {0, 2048, 3999}) {
      flip_bit(a.fs, "a.distcp", payload_offset(a.fs, a.slices[i]) + byte);
      const auto result = load(a.fs, a.requests());
      EXPECT_CODE(result, StatusCode::kCorruption);
      EXPECT_THAT(result.status().message(),
                  AllOf(HasSubstr(a.slices[i].name), HasSubstr("a.distcp"),
                        HasSubstr(std::to_string(a.slices[i].offset))));
      ASSERT_OK(load(a.fs, a.requests(), {}, tiny(2, /*verify=*/false)));
      flip_bit(a.fs, "a.distcp", payload_offset(a.fs, a.slices[i]) + byte);
      ASSERT_OK(load(a.fs, a.requests()));
    }
  }
}

// With and without in-place reads, contiguous and strided destinations sum the same bytes.
TEST(LoadJobTest, AFlippedBitIsFoundOnEveryWayIntoATensor) {
  for (const bool transposed : {false, true}) {
    for (const bool resident : {false, true}) {
      MemoryFileSystem fs({.resident = resident});
      const auto saved = TestTensor::random("w", DType::kFloat32, {600, 500}, 1);
      const StoredSlice slice = save_file(fs, "a", {saved})[0];
      auto loaded = TestTensor::random("w", DType::kFloat32, {600, 500}, 2);
      if (transposed) {
        loaded = TestTensor::random("w", DType::kFloat32, {500, 600}, 2).transposed(0, 1);
      }
      const LoadOptions options = {.buffer_nbytes = 4 << 20, .block_nbytes = 1 << 20};
      ASSERT_OK(load(fs, {whole(slice, loaded)}, {}, options));
      EXPECT_TRUE(loaded.packed() == saved.packed());
      flip_bit(fs, "a", payload_offset(fs, slice) + 700000);
      EXPECT_CODE(load(fs, {whole(slice, loaded)}, {}, options), StatusCode::kCorruption);
    }
  }
}

TEST(LoadJobTest, ADamagedFrameWritesNothing) {
  for (const size_t i : {0u, 1u}) {
    SmallAndLarge a;
    flip_bit(a.fs, "a.distcp", a.slices[i].offset + a.slices[i].nbytes - 22);  // "PK".
    const auto result = load(a.fs, {a.requests()[i]});
    EXPECT_CODE(result, StatusCode::kCorruption);
    EXPECT_THAT(result.status().message(), HasSubstr(a.slices[i].name));
    a.expect_untouched();
  }
}

TEST(LoadJobTest, AnotherDtypeIsLeftToTorchUntouched) {
  SmallAndLarge a;
  for (TestTensor& loaded : a.loaded) loaded.live.dtype = DType::kInt32;
  ASSERT_OK_AND_ASSIGN(const LoadResult result, load(a.fs, a.requests()));
  EXPECT_THAT(result.outcomes, ElementsAre(Outcome::kNeedsTorch, Outcome::kNeedsTorch));
  a.expect_untouched();
}

TEST(LoadJobTest, ABoxOutsideItsTensorOrOfOtherSizesIsAMismatchBeforeAnythingIsWritten) {
  SmallAndLarge a;
  const std::vector<TensorRequest> sound = a.requests();
  const auto refused = load(a.fs, {sound[0], sound[1], part(a.slices[1], {1, 0}, a.loaded[1])});
  EXPECT_CODE(refused, StatusCode::kMismatch);
  EXPECT_THAT(refused.status().message(),
              AllOf(HasSubstr("large.weight"), HasSubstr("[1:301, 0:400]")));
  EXPECT_CODE(load(a.fs, {part(a.slices[0], {0, 1}, a.loaded[0])}), StatusCode::kMismatch);
  TensorRequest other_sizes = sound[0];
  other_sizes.box.sizes = {50, 19};
  EXPECT_CODE(load(a.fs, {other_sizes}), StatusCode::kMismatch);
  a.expect_untouched();
}

}  // namespace
}  // namespace torch_ckpt::load_job_test
