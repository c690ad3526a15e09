#pragma once

// ReadStream: reads many byte ranges of many files with few large requests and a few threads.
//
// This is the only read loop of the engine. The caller lists the wanted ranges and a callback that
// consumes the bytes of each. The stream coalesces ranges, chooses between page cache and direct
// I/O, bounds the memory, and stops all threads at the first error.
//
// If a file has block checksums, the stream reads whole blocks and verifies them before it calls
// the callback. Bytes that fail are an error. A read in place has overwritten its destination by
// then.
//
// A buffer is reused after its bytes are copied out. A device copies asynchronously, so the stream
// reads into other buffers meanwhile. The buffers are in the memory that the device copies from
// fastest.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/file_sums.h"
#include "engine/unpacking.h"
#include "geometry/overlap.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"
#include "io/io_counts.h"

namespace torch_ckpt {

// Alignment that satisfies direct I/O for offsets, lengths and addresses.
inline constexpr int64_t kReadAlignment = 4096;

// Maps a byte range of a file to FQNs, for messages.
class RangeNames {
 public:
  virtual ~RangeNames() = default;

  // Adds the FQNs that have bytes in `range` of the file.
  virtual void add_names(const ByteRange& range, std::set<std::string>* out) const = 0;
};

struct WantedRange {
  File* file = nullptr;
  ByteRange range;  // Within the file, no longer than the stream's max_*_nbytes().
  // Final address of the unchanged bytes, or nullptr. A hint: the stream reads in place if the
  // destination is aligned host memory. `consume` recognizes a read in place by its address.
  std::byte* destination = nullptr;
  const std::string* name = nullptr;  // FQN, for messages.
  const FileSums* sums = nullptr;     // Block checksums of the file; nullptr skips verification.
  const RangeNames* names = nullptr;  // FQNs of a range that several tensors share.
  int64_t group = -1;                 // Number of a group of ranges that should be read together.
  const Device* device = &cpu_device();  // Device of the destination tensor.
};

// Returns the first range whose device is not the host, or nullptr.
const WantedRange* first_for_device(std::span<const WantedRange> wanted);

// Makes a pool of the memory that the range's device copies from fastest, or of host memory if
// `range` is nullptr. Errors: those of `BufferPool::make`, with the name of the range.
Result<std::unique_ptr<BufferPool>> make_pool_for(const WantedRange* range, int64_t nbytes,
                                                  int64_t block_nbytes);

// The byte range to read for a wanted range: whole blocks if the file has checksums.
ByteRange checkable_range(const WantedRange& want);

// Consumes the bytes of wanted range `index`. The stream reuses a buffer after the callback returns
// and the copies added to `unpacking` are done; the stream starts these copies. Called once for
// each range, from several threads at a time.
using ConsumeRange = std::function<Status(int64_t index, Bytes bytes, Unpacking& unpacking)>;

class ReadStream {
 public:
  // Errors: kInvalidArgument if the buffers are too small.
  static Result<std::unique_ptr<ReadStream>> make(FileSystem& fs, int64_t buffer_nbytes,
                                                  int64_t block_nbytes, int threads);

  // The longest range that fits a buffer: one that begins at a block boundary (without `sums`, at a
  // multiple of kReadAlignment), and one at any offset. `sums` are the checksums of the file.
  int64_t max_aligned_range_nbytes(const FileSums* sums = nullptr) const;
  int64_t max_range_nbytes(const FileSums* sums = nullptr) const;

  // Reads every range and calls `consume` for it. On an error it skips the remaining ranges and
  // waits for the reads in flight, so no memory changes after it returns. Do not use the stream
  // again after a kInternal error.
  Status run(std::span<const WantedRange> wanted, const ConsumeRange& consume);

  // Makes the current run, and every later one, fail with kCancelled. It starts no more reads, and
  // waits for those in flight. Any thread may call it.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // Frees the buffers. The next run allocates new ones.
  void release();

  // Requests of all runs, and the seconds for which a thread, on average, did nothing but wait for
  // them. Any thread may call them.
  int64_t requests() const { return counts_.requests(); }
  double waited_s() const { return counts_.waited_s() / static_cast<double>(lanes_.size()); }

 private:
  // One thread's share of the buffers, with its own queue. Both are created when the lane first has
  // work, because memory that a queue has registered stays resident.
  struct Lane {
    std::unique_ptr<BufferPool> pool;
    std::unique_ptr<IoQueue> queue;  // Destroyed before the pool, whose memory it may register.
    bool for_device = false;         // Whether the pool has the memory that a device prefers.
  };
  struct Work;
  class LaneRun;

  ReadStream(FileSystem& fs, size_t lanes, int64_t lane_nbytes, int64_t block_nbytes)
      : fs_(fs), lane_nbytes_(lane_nbytes), block_nbytes_(block_nbytes), lanes_(lanes) {}
  // Whether another request costs more than another copy of a range. Then none is read in place.
  bool shares_all() const;
  Status open(Lane& lane, const WantedRange* for_device);
  static void run_lane_to_end(Lane& lane, Work& work);

  FileSystem& fs_;
  const int64_t lane_nbytes_;
  const int64_t block_nbytes_;
  std::vector<Lane> lanes_;
  std::atomic<bool> cancelled_ = false;
  IoCounts counts_;
};

}  // namespace torch_ckpt
