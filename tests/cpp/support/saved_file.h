#pragma once

// Data files for tests, written by a SaveJob.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "engine/save/save_job.h"
#include "io/buffer_pool.h"
#include "plan/layout.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt {

inline std::unique_ptr<BufferPool> make_pool(int64_t nbytes, int64_t block_nbytes) {
  HeapMemorySource heap;
  auto pool = BufferPool::make(heap, nbytes, block_nbytes);
  EXPECT_OK(pool);
  return std::move(*pool);
}

inline Layout layout_of(const std::vector<TestTensor>& tensors) {
  std::vector<SliceNbytes> items;
  for (const TestTensor& tensor : tensors) {
    const auto nbytes = slice_nbytes(tensor.live.dtype, tensor.live.sizes);
    EXPECT_OK(nbytes);
    items.push_back(*nbytes);
  }
  return lay_out(items);
}

// Saves all of them as they are laid out.
inline Status save_tensors(FileSystem& fs, const std::string& path,
                           const std::vector<TestTensor>& tensors, BufferPool& pool,
                           const SaveOptions& options) {
  ASSIGN_OR_RETURN(const auto job, SaveJob::start(fs, path, layout_of(tensors), pool, options));
  for (size_t i = 0; i < tensors.size(); ++i) {
    RETURN_IF_ERROR(job->write(static_cast<int64_t>(i), tensors[i].live));
  }
  return job->finish();
}

}  // namespace torch_ckpt
