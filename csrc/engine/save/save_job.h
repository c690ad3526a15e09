#pragma once

// SaveJob: writes one data file.
//
// The layout says where every byte of the file belongs. Tensors are packed straight to their place
// in page-aligned windows of the file, each window in one block of a bounded pool; a full window is
// written while the next is being filled. What lies in memory as it will in the file, in long runs
// at addresses that the disk takes, is written from there. Checksums, of payloads and of the file's
// blocks, are computed in the same pass over memory.
// What cannot be laid out beforehand (pickled objects, whose size only pickling tells) is appended
// behind the layout.
//
// FastWriter runs one job for each file, in a thread of its own where a rank writes several.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/block_sums.h"
#include "base/status.h"
#include "engine/live_tensor.h"
#include "engine/save/file_job.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"
#include "plan/layout.h"

namespace torch_ckpt {

// The lengths of the slice of a contiguous tensor, framed.
// Errors: kInvalidArgument for sizes that no tensor has.
Result<SliceNbytes> slice_nbytes(DType dtype, const Dims& sizes);

class SaveJob final : public FileJob {
 public:
  // Creates the file at `path`, which must not exist, with room for the whole layout.
  // Errors: kInvalidArgument where another job has the pool; kStorage.
  static Result<std::unique_ptr<SaveJob>> start(FileSystem& fs, const std::string& path,
                                                Layout layout, BufferPool& pool,
                                                const SaveOptions& options);
  ~SaveJob() override { SaveJob::abort(); }

  // Writes `tensor` as slice `index` of the layout. Indices ascend from call to call; a slice that
  // is passed over stays zero and must not be referred to. The tensor is read until `settle`
  // returns. Errors: kInvalidArgument where index or tensor does not fit the layout; kStorage.
  Status write(int64_t index, const LiveTensor& tensor);

  // Returns when nothing is being written from the memory of tensors.
  Status settle();

  // Appends opaque bytes behind all that was laid out or appended before; returns where they lie.
  Result<Slice> append(Bytes bytes);

  Status finish() override;

  // The sums of the file's blocks. Requires: finish() has returned OK.
  const BlockSums& sums() const { return sums_; }

  // Removes the file, unless finish() has returned OK.
  void abort() override;

 private:
  SaveJob(FileSystem& fs, std::string path, Layout layout, BufferPool& pool,
          const SaveOptions& options);

  Status write_framed(const Slice& slice, const LiveTensor& tensor);
  Result<uint32_t> put_payload(const LiveTensor& tensor, int64_t nbytes);
  bool can_write_in_place(const LiveTensor& tensor) const;
  Result<uint32_t> write_in_place(Bytes bytes);
  Status put(Bytes bytes);
  Status put_zeros_until(int64_t offset);
  Result<MutableBytes> window_rest();
  void fill(int64_t nbytes);
  Status submit_window();

  const Layout layout_;
  int64_t next_index_ = 0;
  int64_t end_ = 0;     // Behind the last byte laid out or appended.
  int64_t cursor_ = 0;  // Next byte of the file to fill.
  int64_t filled_ = 0;  // Bytes of the block that are filled.
  BlockSummer summer_;
  BlockSums sums_;
};

}  // namespace torch_ckpt
