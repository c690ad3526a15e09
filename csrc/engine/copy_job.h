#pragma once

// CopyJob: copies the data files of a checkpoint to another directory or store while training runs.
// It verifies each block that it reads, limits its rate, and can be cancelled. Used by
// storage/copying.py, for a run that saves to a local directory first.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "format/stored_index.h"
#include "io/file_system.h"

namespace torch_ckpt {

// Used by one thread at a time, except `cancel` and `copied_nbytes`.
class CopyJob {
 public:
  // `index` names the files and has their checksums. The files are copied at `nbytes_per_s` at
  // most, all together; 0 for no limit.
  CopyJob(std::shared_ptr<const StoredIndex> index, int64_t nbytes_per_s);

  // Copies a file of the index, durably, to a new file. Blocks until it is copied.
  // Errors: kCorruption if a block or the length does not match the index; kCancelled;
  // kInvalidArgument if the index has no such file; those of the file systems. After an error the
  // target may exist with a subset of the bytes.
  Status copy(int64_t file, FileSystem& from, const std::string& source, FileSystem& to,
              const std::string& target);

  // Makes the current and every later copy fail with kCancelled. Any thread may call it.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // Number of bytes that were read and verified so far. Any thread may call it.
  int64_t copied_nbytes() const { return copied_nbytes_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  // Waits as long as so many bytes take at the rate.
  Status pace(int64_t nbytes);

  const std::shared_ptr<const StoredIndex> index_;
  const int64_t nbytes_per_s_;
  Clock::time_point free_at_;  // When the bytes so far have taken their time.
  std::atomic<bool> cancelled_ = false;
  std::atomic<int64_t> copied_nbytes_ = 0;
};

}  // namespace torch_ckpt
