#pragma once

// FileJob: the base class of SaveJob and SharedFileJob. It writes a file from blocks of a bounded
// pool: some blocks are in flight while the next is filled.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/block_sums.h"
#include "base/bytes.h"
#include "base/status.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"
#include "io/io_counts.h"

namespace torch_ckpt {

struct SaveOptions {
  Caching caching = Caching::kDirect;
  bool sync = true;  // Whether finish() makes the file survive a power cut.
  int64_t sum_block_nbytes = kSumBlockNbytes;
  int niceness = 0;  // Niceness of the writing threads (base/niceness.h).
};

// How the file was actually written, for reports to the user.
struct IoMode {
  QueueMode queue;
  bool direct = false;
  std::string reason;  // Why I/O is not direct; empty if it is direct.
};

// Used by one thread at a time, except `cancel`. After an error every further call returns the same
// error. Reserves the pool until the job finishes or aborts. Requires: the pool outlives the job.
class FileJob {
 public:
  FileJob(const FileJob&) = delete;
  FileJob& operator=(const FileJob&) = delete;
  virtual ~FileJob() = default;

  // Waits until every byte is written, and synced if the options request it. The caller syncs the
  // directory entry. No write is possible afterwards.
  virtual Status finish() = 0;

  // Aborts the job, unless finish() has returned OK: waits for the writes in flight and returns all
  // blocks to the pool. The destructor does the same.
  virtual void abort() = 0;

  // Makes the current and every later call fail with kCancelled, before its next request. Requests
  // in flight are not interrupted. Any thread may call it.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // Any thread may call it.
  const IoCounts& counts() const { return counts_; }

  int niceness() const { return options_.niceness; }
  const IoMode& mode() const { return mode_; }

 protected:
  static constexpr int kNoBlock = -1;

  FileJob(FileSystem& fs, std::string path, BufferPool& pool, const SaveOptions& options);

  // Errors: kInvalidArgument if another job uses the pool; kStorage.
  Status open(OpenMode mode);

  // Waits for a free block and acquires it.
  Status acquire(int* block);
  // Submits a write of `memory`, and releases `block` when the write is done. `block` is kNoBlock
  // for memory outside the pool. Requires: the memory does not change until the write is done.
  Status submit(int64_t offset, MutableBytes memory, int block);
  Status wait_for_all();
  // Whether a write from memory outside the pool is in flight.
  bool is_writing_in_place() const { return in_place_ > 0 && queue_->in_flight() > 0; }
  Status wait_for_some();
  // Waits for all writes, sets the length of the file if it is given, and syncs the file if the
  // options request it. A stream needs its length.
  Status complete(std::optional<int64_t> nbytes);
  // Waits for all submitted writes, and ignores their errors. Returns whether a file was open.
  bool stop_writes();
  // Closes the file and releases the pool. A finished job may live on, for its progress, while
  // other files are written. Requires: no write is in flight.
  void release();

  // Stores the first error, and returns it in every later call.
  Status fail(Status status);
  Status check_open() const;
  Status check_cancelled() const;

  FileSystem& fs_;
  const std::string path_;
  BufferPool& pool_;
  const SaveOptions options_;
  std::unique_ptr<File> file_;
  IoCounts counts_;
  int block_ = kNoBlock;  // The block that is being filled.
  bool finished_ = false;

 private:
  IoMode mode_;
  std::unique_ptr<IoQueue> queue_;  // Destroyed before the file: its destructor waits for writes.
  IoRequest::Kind doing_ = IoRequest::Kind::kWrite;  // What `wait_for_some` waits for.
  int in_place_ = 0;  // Number of writes in flight from memory outside the pool.
  std::atomic<bool> cancelled_ = false;
  Status status_;  // The first error.
  bool owns_pool_ = false;
};

}  // namespace torch_ckpt
