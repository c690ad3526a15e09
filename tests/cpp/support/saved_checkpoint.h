#pragma once

// A checkpoint's data files in memory, and requests for what they hold.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/load/load_job.h"
#include "format/zip_frame.h"
#include "support/memory_file_system.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt {

inline constexpr char kCheckpoint[] = "step-1";

// Saves the tensors as one file of the checkpoint; returns where their slices lie.
inline std::vector<StoredSlice> save_file(MemoryFileSystem& fs, const std::string& file,
                                          const std::vector<TestTensor>& tensors) {
  const auto pool = make_pool(1 << 20, 64 << 10);
  EXPECT_OK(save_tensors(fs, std::string(kCheckpoint) + "/" + file, tensors, *pool, {}));
  std::vector<StoredSlice> slices;
  const Layout layout = layout_of(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Slice& slice = layout.slices[i];
    slices.push_back({file, slice.offset, slice.total_nbytes(), tensors[i].live.name});
  }
  return slices;
}

// Turns over one bit of a file.
inline void flip_bit(MemoryFileSystem& fs, const std::string& file, int64_t offset) {
  const std::string path = std::string(kCheckpoint) + "/" + file;
  std::string contents = *fs.contents(path);
  contents[static_cast<size_t>(offset)] ^= 0x10;
  fs.put(path, contents);
}

// Where the payload of a slice begins in its file.
inline int64_t payload_offset(const MemoryFileSystem& fs, const StoredSlice& slice) {
  const std::string contents = *fs.contents(std::string(kCheckpoint) + "/" + slice.file);
  const Bytes stored = torch_ckpt::slice(as_bytes(contents), slice.offset, slice.nbytes);
  const auto parsed = parse_frame(stored, stored, slice.nbytes);
  EXPECT_OK(parsed);
  return slice.offset + parsed->payload_offset;
}

// All of a stored tensor of the destination's sizes.
inline TensorRequest whole(const StoredSlice& slice, const TestTensor& destination) {
  return {
      slice, {Dims(destination.live.sizes.size(), 0), destination.live.sizes}, destination.live};
}

inline TensorRequest part(const StoredSlice& slice, const Dims& offsets,
                          const TestTensor& destination) {
  return {slice, {offsets, destination.live.sizes}, destination.live};
}

// Buffers so small that every limit is met.
inline LoadOptions tiny(int threads = 2, bool verify = true) {
  return {
      .buffer_nbytes = 96 << 10, .block_nbytes = 16 << 10, .threads = threads, .verify = verify};
}

inline Result<LoadResult> load(FileSystem& fs, const std::vector<TensorRequest>& tensors,
                               const std::vector<StoredSlice>& bytes = {},
                               const LoadOptions& options = tiny()) {
  ASSIGN_OR_RETURN(const auto job, LoadJob::make(fs, kCheckpoint, options));
  return job->run(tensors, bytes);
}

}  // namespace torch_ckpt
