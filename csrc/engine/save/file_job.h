#pragma once

// FileJob: what SaveJob and SharedFileJob have in common. They write a file from blocks of a
// bounded pool: while some are being written, the next is filled.

#include <cstdint>
#include <memory>
#include <string>

#include "base/block_sums.h"
#include "base/bytes.h"
#include "base/status.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"

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

// Owned and used by one thread at a time. After an error every further call fails with it too. The
// pool outlives the job, which reserves it until it has finished or given up.
class FileJob {
 public:
  FileJob(const FileJob&) = delete;
  FileJob& operator=(const FileJob&) = delete;
  virtual ~FileJob() = default;

  // Returns when every byte has been written (and synced, as the options say; the file's name is
  // for the caller to sync). Nothing can be written afterwards.
  virtual Status finish() = 0;

  // Gives up, unless finish() has returned OK: waits for what is in flight and gives all blocks
  // back to the pool. The destructor does so too.
  virtual void abort() = 0;

  int niceness() const { return options_.niceness; }
  const IoMode& mode() const { return mode_; }

 protected:
  static constexpr int kNoBlock = -1;

  FileJob(FileSystem& fs, std::string path, BufferPool& pool, const SaveOptions& options);

  // Errors: kInvalidArgument where another job has the pool; kStorage.
  Status open(OpenMode mode);

  // A block to fill, as soon as one is free.
  Status acquire(int* block);
  // Has memory written; it stays as it is until then. If it is of a block of the pool, that is
  // released afterwards.
  Status submit(int64_t offset, MutableBytes memory, int block);
  Status wait_for_all();
  // Whether memory that is not the pool's is still being written.
  bool is_writing_in_place() const { return in_place_ > 0 && queue_->in_flight() > 0; }
  Status wait_for_some();
  // Syncs the file if the options say so. Requires: nothing is in flight.
  Status sync();
  // Waits for all that was submitted, whatever becomes of it. Returns whether a file was open.
  bool stop_writes();
  void let_go();

  // Remembers the first error, and returns it from then on.
  Status fail(Status status);
  Status check_open() const;

  FileSystem& fs_;
  const std::string path_;
  BufferPool& pool_;
  const SaveOptions options_;
  std::unique_ptr<File> file_;
  int block_ = kNoBlock;  // The one that is being filled.
  bool finished_ = false;

 private:
  IoMode mode_;
  std::unique_ptr<IoQueue> queue_;  // Destroyed before the file: it waits for what is in flight.
  int in_place_ = 0;                // Writes in flight from memory that is not the pool's.
  Status status_;                   // The first error.
  bool holds_pool_ = false;
};

}  // namespace torch_ckpt
