#pragma once

// ReadStream: many byte ranges of many files, read with few large requests by a few threads.
//
// The one read loop of the engine. The caller says which ranges it wants and what to do with the
// bytes of each; the stream coalesces, chooses between page cache and direct I/O, keeps the queue
// full and the memory bounded, and stops everything at the first error. Where a file's blocks have
// known sums, it reads whole blocks and lets nobody see bytes that fail them (in place, where they
// are seen to fail too late, it is an error as well).
//
// A buffer is read into again when what was in it is in place. Where that is up to a device, others
// are read into meanwhile, and the buffers are of the kind that the device copies from fastest.

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

namespace torch_ckpt {

// What direct I/O may ask of offsets, lengths and addresses.
inline constexpr int64_t kReadAlignment = 4096;

// Tells whose bytes lie in a range, for messages.
class RangeNames {
 public:
  virtual ~RangeNames() = default;

  // Adds FQNs that have bytes in `range` of the file.
  virtual void add_names(const ByteRange& range, std::set<std::string>* out) const = 0;
};

struct WantedRange {
  File* file = nullptr;
  ByteRange range;  // Within the file, no longer than the stream's max_*_nbytes().
  // Where the bytes belong as they are, or nullptr. A hint: they are read in place if alignment
  // allows it and it is ordinary memory, and `consume` sees which from the address it is given.
  std::byte* destination = nullptr;
  const std::string* name = nullptr;  // FQN, for messages.
  const FileSums* sums = nullptr;     // Of the file, where it is to be checked.
  const RangeNames* names = nullptr;  // FQNs, of a range that is of several.
  int64_t group = -1;  // Ranges that are best read together, by a number of their own.
  const Device* device = &cpu_device();  // Of what the bytes go to.
};

// The first range that goes to a device other than the CPU; nullptr where there is none.
const WantedRange* first_for_device(std::span<const WantedRange> wanted);

// A pool of what that range's device copies from fastest; of ordinary memory where it is nullptr.
// Errors: those of `BufferPool::make`, with the name of the range.
Result<std::unique_ptr<BufferPool>> make_pool_for(const WantedRange* range, int64_t nbytes,
                                                  int64_t block_nbytes);

// What must be read to have a wanted range, and to check it.
ByteRange checkable_range(const WantedRange& want);

// Takes the bytes of wanted range `index`. Unless they are in place they are gone when it returns,
// but for what is added to `unpacking`, which is started then. Called from several threads at a
// time, once for each range.
using ConsumeRange = std::function<Status(int64_t index, Bytes bytes, Unpacking& unpacking)>;

class ReadStream {
 public:
  // Errors: kInvalidArgument where the buffers are too small to read through.
  static Result<std::unique_ptr<ReadStream>> make(FileSystem& fs, int64_t buffer_nbytes,
                                                  int64_t block_nbytes, int threads);

  // The longest range that a buffer takes of a file whose blocks are checked against `sums`, or of
  // one that is not checked: one that begins where a block may, or a direct read; and any.
  int64_t max_aligned_range_nbytes(const FileSums* sums = nullptr) const;
  int64_t max_range_nbytes(const FileSums* sums = nullptr) const;

  // Reads every range and has it consumed. On an error the rest is not read; ranges in flight are
  // waited for, so no memory is touched after this returns. After a kInternal error the stream must
  // not be used again.
  Status run(std::span<const WantedRange> wanted, const ConsumeRange& consume);

  // Frees the buffers; the next run makes others.
  void let_go();

 private:
  // One thread's share of the buffers, with its own queue. Without either until there is work for
  // it: memory that a queue has registered is there for good.
  struct Lane {
    std::unique_ptr<BufferPool> pool;
    std::unique_ptr<IoQueue> queue;  // Destroyed before the pool: it may have registered it.
    bool for_device = false;         // Whether its memory is of the kind that devices copy from.
  };
  struct Work;
  class LaneRun;

  ReadStream(FileSystem& fs, size_t lanes, int64_t lane_nbytes, int64_t block_nbytes)
      : fs_(fs), lane_nbytes_(lane_nbytes), block_nbytes_(block_nbytes), lanes_(lanes) {}
  Status open(Lane& lane, const WantedRange* for_device);
  static void run_lane_to_end(Lane& lane, Work& work);

  FileSystem& fs_;
  const int64_t lane_nbytes_;
  const int64_t block_nbytes_;
  std::vector<Lane> lanes_;
};

}  // namespace torch_ckpt
