#pragma once

// SaveJob: writes one data file.
//
// The layout fixes the offset of every byte. The job packs tensors to their offsets in page-aligned
// windows of the file. Each window is one block of a bounded pool, and is written while the next
// window is filled. A long contiguous run at an aligned address, or a whole part of a stream, is
// written directly from the tensor's memory. The same pass over memory computes the checksums of
// payloads and of the file's blocks.
//
// Pickled objects have no known size before pickling, so they are appended after the layout.
//
// FastWriter runs one job for each file. If a rank writes several files, each job has a thread.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/block_sums.h"
#include "base/status.h"
#include "engine/live_tensor.h"
#include "engine/save/file_job.h"
#include "engine/value_digest.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"
#include "plan/layout.h"

namespace torch_ckpt {

// Returns the lengths of head, payload and tail of a contiguous tensor's slice.
// Errors: kInvalidArgument for invalid sizes.
Result<SliceNbytes> slice_nbytes(DType dtype, const Dims& sizes);

class SaveJob final : public FileJob {
 public:
  // Creates the file at `path`, which must not exist, and reserves space for the whole layout.
  // Errors: kInvalidArgument if another job uses the pool; kStorage.
  static Result<std::unique_ptr<SaveJob>> start(FileSystem& fs, const std::string& path,
                                                Layout layout, BufferPool& pool,
                                                const SaveOptions& options);
  ~SaveJob() override { SaveJob::abort(); }

  // Writes `tensor` as slice `index` of the layout. Requires: indices ascend from call to call; the
  // tensor does not change until `settle` returns. A skipped slice stays zero, and the caller must
  // not refer to it. `digest`, unless null, receives the digest of the elements.
  // Errors: kInvalidArgument if index or tensor do not fit the layout; kStorage.
  Status write(int64_t index, const LiveTensor& tensor, Digest128* digest = nullptr);

  // Waits until no write from the memory of tensors is in flight.
  Status settle();

  // Appends opaque bytes after the layout and all earlier appends. Returns their slice.
  Result<Slice> append(Bytes bytes);

  Status finish() override;

  // The checksums of the file's blocks. Requires: finish() has returned OK.
  const BlockSums& sums() const { return sums_; }

  // Removes the file, unless finish() has returned OK.
  void abort() override;

 private:
  SaveJob(FileSystem& fs, std::string path, Layout layout, BufferPool& pool,
          const SaveOptions& options);

  Status write_framed(const Slice& slice, const LiveTensor& tensor);
  Result<uint32_t> put_payload(const LiveTensor& tensor, int64_t nbytes);
  int64_t in_place_nbytes(const LiveTensor& tensor, int64_t done, int64_t nbytes) const;
  Result<uint32_t> write_in_place(Bytes bytes, uint32_t crc);
  Status put(Bytes bytes);
  Status put_zeros_until(int64_t offset);
  Result<MutableBytes> window_rest();
  void fill(int64_t nbytes);
  Status submit_window();

  const Layout layout_;
  int64_t next_index_ = 0;
  int64_t end_ = 0;     // End of the layout and of all appends.
  int64_t cursor_ = 0;  // File offset of the next byte to fill.
  int64_t filled_ = 0;  // Number of filled bytes in the block.
  BlockSummer summer_;
  BlockSums sums_;
  bool digests_ = false;  // Whether the tensor that is being written gets a digest.
  DigestStream digest_;
};

}  // namespace torch_ckpt
