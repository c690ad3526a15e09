#pragma once

// A checkpoint of one file in memory that has an index: what is loaded of it is checked by blocks.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/load/load_job.h"
#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/saved_checkpoint.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt {

inline constexpr int64_t kSumBlock = 4096;

// Tensors of many lengths in one file, and its index. Objects lie behind them.
struct Indexed {
  MemoryFileSystem fs;
  std::vector<TestTensor> saved;
  std::vector<StoredSlice> slices;
  StoredSlice object;
  std::shared_ptr<Index> index = std::make_shared<Index>();

  explicit Indexed(const MemoryOptions& options = {}) : fs(options) {
    const std::vector<Dims> shapes = {{},     {7, 5},     {3},       {300, 400}, {0, 3},
                                      {1000}, {60000, 2}, {40, 128}, {33, 1, 9}, {500, 1000}};
    for (const Dims& sizes : shapes) {
      const auto seed = static_cast<uint32_t>(saved.size());
      saved.push_back(TestTensor::random("t" + std::to_string(seed), DType::kFloat32, sizes, seed));
    }
    const auto pool = make_pool(1 << 20, 64 << 10);
    const SaveOptions save = {.sum_block_nbytes = kSumBlock};
    const Layout layout = layout_of(saved);
    auto job = std::move(*SaveJob::start(fs, "step-1/a", layout, *pool, save));
    IndexedFile file = {.name = "a"};
    for (size_t i = 0; i < saved.size(); ++i) {
      EXPECT_OK(job->write(static_cast<int64_t>(i), saved[i].live));
      const Slice& slice = layout.slices[i];
      slices.push_back({"a", slice.offset, slice.total_nbytes(), saved[i].live.name});
      index->entries.push_back(entry_of(saved[i].live, slice, 0));
    }
    const std::vector<std::byte> bytes = random_bytes(50000, 99);
    const Slice appended = *job->append(bytes);
    object = {"a", appended.offset, appended.total_nbytes(), "object"};
    index->entries.push_back(
        {.fqn = "object", .boxes = {{{}, {}, 0, object.offset, object.nbytes}}});
    EXPECT_OK(job->finish());
    file.sums = job->sums();
    index->files = {file};
    index->has_entries = true;
    index->save_id = "0123456789abcdef";
    // It is one that could have been read from a file.
    EXPECT_OK(write_index(*index));
  }

  static LoadOptions options(bool verify = true) {
    return {.buffer_nbytes = 192 << 10, .block_nbytes = 48 << 10, .threads = 2, .verify = verify};
  }
  Result<LoadResult> load(const std::vector<TensorRequest>& tensors,
                          const std::vector<StoredSlice>& bytes = {},
                          const LoadOptions& options = Indexed::options()) {
    ASSIGN_OR_RETURN(const auto job, LoadJob::make(fs, kCheckpoint, options, opened(*index)));
    return job->run(tensors, bytes);
  }
  TestTensor destination(size_t i) const {
    return TestTensor::random(saved[i].live.name, DType::kFloat32, saved[i].live.sizes, 100);
  }
};

}  // namespace torch_ckpt
