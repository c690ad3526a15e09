#pragma once

// SharedFileJob: writes one rank's part of a file that several ranks write at the same time.
//
// In a file of whole, row-major tensors (safetensors) every byte has its place from names, dtypes
// and sizes alone. So each rank writes its boxes straight to where they belong, and nobody puts the
// file together afterwards. A box is one run of bytes of the file, or one for each of its rows.
//
// Ranks share pages where their runs meet. A write past the page cache takes whole pages, so one of
// a page that is shared would undo what another rank has written to it. Therefore only pages that
// lie within a run are written past the page cache, and its ends through it, where the kernel
// writes bytes and not pages. No page is ever written both ways.
//
// FastWriter runs one job for each file that a rank has a part of, in one or more threads.

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/live_tensor.h"
#include "engine/save/file_job.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"

namespace torch_ckpt {

// A box of a tensor that lies whole and row-major in a file.
struct BoxPlace {
  int64_t payload_offset = 0;  // Of the tensor, in the file.
  Dims tensor_sizes;
  Dims box_offsets;
};

class SharedFileJob final : public FileJob {
 public:
  // Opens the file at `path`, or creates it, with room for `file_nbytes`: the same for every rank.
  // Errors: kInvalidArgument where another job has the pool; kStorage.
  static Result<std::unique_ptr<SharedFileJob>> start(FileSystem& fs, const std::string& path,
                                                      int64_t file_nbytes, BufferPool& pool,
                                                      const SaveOptions& options);
  ~SharedFileJob() override { SharedFileJob::abort(); }

  // Writes `tensor` where `place` says. What runs on in the file should follow in that order: it is
  // written together. The tensor is read before this returns.
  // Errors: kInvalidArgument where the box does not lie within tensor and file; kStorage.
  Status write(const BoxPlace& place, const LiveTensor& tensor);

  // Writes bytes that belong to no tensor.
  Status put(int64_t offset, Bytes bytes);

  Status finish() override;

  // The file stays, for it is not this rank's alone.
  void abort() override { (void)stop_writes(); }

 private:
  SharedFileJob(FileSystem& fs, std::string path, int64_t file_nbytes, BufferPool& pool,
                const SaveOptions& options);

  Status write_runs(const BoxPlace& place, const LiveTensor& tensor);
  Status put_in_window(int64_t offset, Bytes bytes);
  Status write_window();

  const int64_t file_nbytes_;
  int64_t window_ = 0;  // Offset in the file of the block's first byte: whole pages.
  int64_t begin_ = 0;   // The bytes of the file that the block holds: [begin, cursor).
  int64_t cursor_ = 0;
};

}  // namespace torch_ckpt
