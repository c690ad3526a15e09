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
#include "io/buffer_pool.h"
#include "io/file_system.h"
#include "plan/layout.h"

namespace torch_ckpt {

struct SaveOptions {
  Caching caching = Caching::kDirect;
  bool sync = true;  // Whether finish() makes the file survive a power cut.
  int64_t sum_block_nbytes = kSumBlockNbytes;
  int niceness = 0;  // Of the threads that write (base/niceness.h).
};

// How a file was really written, for people to read.
struct IoMode {
  QueueMode queue;
  bool direct = false;
  std::string reason;  // Why it is not direct; empty when it is.
};

// The lengths of the slice of a contiguous tensor, framed.
// Errors: kInvalidArgument for sizes that no tensor has.
Result<SliceNbytes> slice_nbytes(DType dtype, const Dims& sizes);

// Owned and used by one thread at a time. After an error every further call fails with it too.
class SaveJob {
 public:
  // Creates the file at `path`, which must not exist, with room for the whole layout. `pool`
  // outlives the job, which reserves it until it has finished or given up.
  // Errors: kInvalidArgument where another job has the pool; kStorage.
  static Result<std::unique_ptr<SaveJob>> start(FileSystem& fs, const std::string& path,
                                                Layout layout, BufferPool& pool,
                                                const SaveOptions& options);
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  // Writes `tensor` as slice `index` of the layout. Indices ascend from call to call; a slice that
  // is passed over stays zero and must not be referred to. The tensor is read until `settle`
  // returns. Errors: kInvalidArgument where index or tensor does not fit the layout; kStorage.
  Status write(int64_t index, const LiveTensor& tensor);

  // Returns when nothing is being written from the memory of tensors.
  Status settle();

  // Appends opaque bytes behind all that was laid out or appended before; returns where they lie.
  Result<Slice> append(Bytes bytes);

  // Returns when every byte has been written (and synced, as the options say; the file's name is
  // for the caller to sync). Nothing can be written afterwards.
  Status finish();

  int niceness() const { return options_.niceness; }

  // The sums of the file's blocks. Requires: finish() has returned OK.
  const BlockSums& sums() const { return sums_; }

  // Gives up, unless finish() has returned OK: waits for what is in flight, gives all blocks back
  // to the pool and removes the file. The destructor does so too.
  void abort();

  const IoMode& mode() const { return mode_; }

 private:
  SaveJob(FileSystem& fs, std::string path, Layout layout, BufferPool& pool,
          const SaveOptions& options);

  Status open();
  Status write_framed(const Slice& slice, const LiveTensor& tensor);
  Result<uint32_t> put_payload(const LiveTensor& tensor, int64_t nbytes);
  bool can_write_in_place(const LiveTensor& tensor) const;
  Result<uint32_t> write_in_place(Bytes bytes);
  Status put(Bytes bytes);
  Status put_zeros_until(int64_t offset);
  Result<MutableBytes> window_rest();
  void fill(int64_t nbytes);
  Status submit_window();
  Status wait_for_some();
  Status fail(Status status);
  Status check_open();
  void let_go();

  FileSystem& fs_;
  const std::string path_;
  const Layout layout_;
  BufferPool& pool_;
  const SaveOptions options_;
  IoMode mode_;

  std::unique_ptr<File> file_;
  std::unique_ptr<IoQueue> queue_;  // Destroyed before the file: it waits for what is in flight.
  int64_t next_index_ = 0;
  int64_t end_ = 0;     // Behind the last byte laid out or appended.
  int64_t cursor_ = 0;  // Next byte of the file to fill.
  int block_ = -1;      // The window being filled; -1 between windows.
  int64_t filled_ = 0;  // Bytes of it that are filled.
  int in_place_ = 0;    // Writes in flight from the memory of tensors.
  BlockSummer summer_;
  BlockSums sums_;
  Status status_;  // The first error.
  bool holds_pool_ = true;
  bool finished_ = false;
};

}  // namespace torch_ckpt
