#pragma once

// SharedFileJob: writes one rank's share of a file that several ranks write concurrently.
//
// In a file of whole, row-major tensors (safetensors), names, dtypes and sizes fix the offset of
// every byte. So each rank writes its boxes directly to their final offsets, and no merge step
// follows. A box is one run of bytes in the file, or one run per row.
//
// Runs of different ranks can share a page. A direct write covers whole pages, so a direct write of
// a shared page would overwrite another rank's bytes. Therefore the job writes a page directly only
// if it lies within one run. It writes the ends of a run through the page cache, where a write
// covers exact bytes. No page is ever written both ways.
//
// If the file system does not write at offsets, the file is a stream. Then one job writes all of
// it, in ascending order, and it appears with `finish`.
//
// FastWriter runs one job for each file that the rank contributes to, in one or more threads.

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/live_tensor.h"
#include "engine/save/file_job.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"

namespace torch_ckpt {

// A box of a tensor that is stored whole and row-major in a file.
struct BoxPlace {
  int64_t payload_offset = 0;  // Offset of the whole tensor in the file.
  Dims tensor_sizes;
  Dims box_offsets;
};

class SharedFileJob final : public FileJob {
 public:
  // Opens the file at `path`, which exists unless it is a stream, and reserves `file_nbytes`, which
  // is equal on all ranks. Errors: kInvalidArgument if another job uses the pool; kNotFound;
  // kStorage.
  static Result<std::unique_ptr<SharedFileJob>> start(FileSystem& fs, const std::string& path,
                                                      int64_t file_nbytes, BufferPool& pool,
                                                      const SaveOptions& options);
  ~SharedFileJob() override { SharedFileJob::abort(); }

  // Writes `tensor` to its place in the file. Consecutive calls for adjacent runs are combined into
  // larger writes. The caller may change the tensor after this returns.
  // Errors: kInvalidArgument if the box exceeds the tensor or the file; kStorage.
  Status write(const BoxPlace& place, const LiveTensor& tensor);

  // Writes bytes that belong to no tensor.
  Status put(int64_t offset, Bytes bytes);

  Status finish() override;

  // Does not remove the file, because other ranks write it too.
  void abort() override { (void)stop_writes(); }

 private:
  SharedFileJob(FileSystem& fs, std::string path, int64_t file_nbytes, BufferPool& pool,
                const SaveOptions& options);

  bool is_stream() const { return !fs_.traits().writes_at_offsets; }
  Status write_runs(const BoxPlace& place, const LiveTensor& tensor);
  Status put_in_window(int64_t offset, Bytes bytes);
  Status write_window();

  const int64_t file_nbytes_;
  int64_t window_ = 0;  // File offset of the block's first byte, a multiple of the page size.
  int64_t begin_ = 0;   // The block contains the file range [begin, cursor).
  int64_t cursor_ = 0;
};

}  // namespace torch_ckpt
