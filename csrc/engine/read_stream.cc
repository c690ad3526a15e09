#include "engine/read_stream.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "plan/coalesce.h"

namespace torch_ckpt {
namespace {

// Ranges with a destination and at least this length get a separate request, in place if possible.
constexpr int64_t kInPlaceNbytes = int64_t{256} << 10;

// Length of the parts in which a cached read in place is verified. A part stays in the second-level
// cache of the processor between the kernel's copy and the checksum.
constexpr int64_t kCachedPartNbytes = int64_t{512} << 10;

// Longest range if all ranges share requests, so that several fill one.
constexpr int64_t kSharedNbytes = int64_t{1} << 20;

bool is_aligned(const std::byte* address, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0;
}

// Granularity of verified reads (the checksum block), or else of direct reads.
int64_t grain_of(const FileSums* sums) {
  return sums == nullptr ? kReadAlignment : sums->block_nbytes;
}

// One read request. It serves the wanted ranges order[first, last) of the work.
struct Task {
  File* file;
  ByteRange range;
  int64_t first;
  int64_t last;
  std::byte* destination;  // Destination of a single range that may be read in place, or nullptr.
};

}  // namespace

const WantedRange* first_for_device(std::span<const WantedRange> wanted) {
  const auto found =
      std::ranges::find_if(wanted, [](const WantedRange& want) { return !want.device->is_host(); });
  return found == wanted.end() ? nullptr : &*found;
}

Result<std::unique_ptr<BufferPool>> make_pool_for(const WantedRange* range, int64_t nbytes,
                                                  int64_t block_nbytes) {
  if (range == nullptr) return BufferPool::make(cpu_device().buffers(), nbytes, block_nbytes);
  auto pool = BufferPool::make(range->device->buffers(), nbytes, block_nbytes);
  if (pool.ok() || range->name == nullptr) return pool;
  return Status(pool.status().code(),
                str_cat("cannot load '", *range->name, "': ", pool.status().message()),
                pool.status().error_number());
}

ByteRange checkable_range(const WantedRange& want) {
  if (want.sums == nullptr) return want.range;
  return {want.sums->block_begin(want.range.begin), want.sums->block_end(want.range.end)};
}

// State that the lanes share during a run.
struct ReadStream::Work {
  std::span<const WantedRange> wanted;
  const ConsumeRange& consume;
  const bool shares_all;  // See ReadStream::shares_all.
  const std::atomic<bool>& cancelled_by_caller;
  IoCounts& counts;
  std::vector<int64_t> order;
  std::vector<Task> tasks;
  std::atomic<size_t> next_task = 0;
  std::atomic<bool> stopped = false;
  std::mutex mutex;
  Status status;  // The first error; guarded by mutex.

  Work(std::span<const WantedRange> ranges, const ConsumeRange& consumer, int64_t max_nbytes,
       int64_t max_gap, bool share_all, const std::atomic<bool>& is_cancelled, IoCounts& counted)
      : wanted(ranges),
        consume(consumer),
        shares_all(share_all),
        cancelled_by_caller(is_cancelled),
        counts(counted) {
    std::map<File*, std::vector<int64_t>> shared;  // Ranges that may share a request.
    for (int64_t i = 0; i < static_cast<int64_t>(wanted.size()); ++i) {
      const WantedRange& want = wanted[static_cast<size_t>(i)];
      if (shares_all || want.destination == nullptr || want.range.nbytes() < kInPlaceNbytes ||
          checkable_range(want) != want.range) {
        shared[want.file].push_back(i);
        continue;
      }
      const auto at = static_cast<int64_t>(order.size());
      order.push_back(i);
      std::byte* in_place = want.device->is_host() ? want.destination : nullptr;
      tasks.push_back({want.file, want.range, at, at + 1, in_place});
    }
    for (const auto& [file, indices] : shared) add_shared(file, indices, max_nbytes, max_gap);
  }

  void add_shared(File* file, const std::vector<int64_t>& indices, int64_t max_nbytes,
                  int64_t max_gap) {
    std::vector<ByteRange> ranges;
    ranges.reserve(indices.size());
    for (const int64_t i : indices) {
      ranges.push_back(checkable_range(wanted[static_cast<size_t>(i)]));
    }
    const Reads reads = coalesce(ranges, max_nbytes, max_gap);
    const auto base = static_cast<int64_t>(order.size());
    for (const int64_t i : reads.order) order.push_back(indices[static_cast<size_t>(i)]);
    for (const Read& read : reads.reads) {
      tasks.push_back({file, read.range, base + read.first, base + read.last, nullptr});
    }
  }

  void fail(const Status& error) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (status.ok()) status = error;
    stopped = true;
  }

  // Whether to start no more reads. Fails the run if the caller has cancelled it.
  bool must_stop() {
    if (!stopped && cancelled_by_caller.load(std::memory_order_relaxed)) {
      fail(cancelled("stopped reading: the load has failed elsewhere"));
    }
    return stopped;
  }

  const WantedRange& wanted_of(int64_t at) const {
    return wanted[static_cast<size_t>(order[static_cast<size_t>(at)])];
  }

  // Lists at most kMostNames FQNs whose bytes the task reads in `range`: "'a', 'b'".
  std::string names_in(const Task& task, const ByteRange& range) const {
    constexpr size_t kMostNames = 8;
    std::set<std::string> names;
    for (int64_t i = task.first; i < task.last && names.size() < kMostNames; ++i) {
      const WantedRange& want = wanted[static_cast<size_t>(order[static_cast<size_t>(i)])];
      if (want.range.begin >= range.end || want.range.end <= range.begin) continue;
      if (want.name != nullptr) names.insert(*want.name);
      if (want.names != nullptr) want.names->add_names(range, &names);
    }
    std::string out;
    size_t count = 0;
    for (const std::string& name : names) {
      if (count++ == kMostNames) break;
      out += str_cat(out.empty() ? "'" : ", '", name, "'");
    }
    return out;
  }

  // Adds the FQNs of a failed read to its status.
  Status with_name(const Task& task, const Status& error) const {
    const WantedRange& first = wanted[static_cast<size_t>(order[static_cast<size_t>(task.first)])];
    const std::string names = names_in(task, first.range);
    if (names.empty()) return error;
    return Status(error.code(), str_cat("cannot load ", names, ": ", error.message()),
                  error.error_number());
  }

  // Verifies the blocks of a task that have wanted bytes. `bytes` are those of its range.
  Status check_task(const Task& task, Bytes bytes) const {
    int64_t checked = task.range.begin;  // End of the blocks that are verified, or not wanted.
    for (int64_t i = task.first; i < task.last;) {
      ByteRange run = checkable_range(wanted_of(i));
      while (++i < task.last && wanted_of(i).range.begin <= run.end) {
        run.end = std::max(run.end, checkable_range(wanted_of(i)).end);
      }
      run.begin = std::max(run.begin, checked);
      if (run.nbytes() <= 0) continue;
      checked = run.end;
      const Bytes blocks = slice(bytes, run.begin - task.range.begin, run.nbytes());
      RETURN_IF_ERROR(check_blocks(task, run.begin, blocks));
    }
    return ok_status();
  }

  Status check_blocks(const Task& task, int64_t begin, Bytes bytes) const {
    const WantedRange& first = wanted_of(task.first);
    if (first.sums == nullptr) return ok_status();
    ASSIGN_OR_RETURN(const int64_t mismatch, first.sums->first_mismatch(begin, bytes));
    if (mismatch < 0) return ok_status();
    const int64_t end = first.sums->block_end(mismatch + 1);
    // Any tensor with bytes in the block may be the damaged one.
    const std::string names = names_in(task, {mismatch, end});
    return corruption(names.empty() ? "" : str_cat("cannot load ", names, ": "), "the ",
                      end - mismatch, " bytes at ", mismatch, " of ", task.file->path(),
                      " do not have the checksum that the index states");
  }

  // Verifies and consumes every range of a task, then starts the unpacking. `bytes` begin at
  // `offset` of the file. The first `verified_nbytes` of them are verified already.
  Status consume_task(const Task& task, Bytes bytes, int64_t offset, int64_t verified_nbytes,
                      Unpacking& unpacking) const {
    if (verified_nbytes > 0) {
      RETURN_IF_ERROR(check_blocks(task, offset + verified_nbytes,
                                   slice(bytes, verified_nbytes, ssize(bytes) - verified_nbytes)));
    } else {
      RETURN_IF_ERROR(
          check_task(task, slice(bytes, task.range.begin - offset, task.range.nbytes())));
    }
    for (int64_t i = task.first; i < task.last; ++i) {
      const int64_t index = order[static_cast<size_t>(i)];
      const ByteRange& range = wanted[static_cast<size_t>(index)].range;
      const Bytes here = slice(bytes, range.begin - offset, range.nbytes());
      RETURN_IF_ERROR(consume(index, here, unpacking));
    }
    return unpacking.start();
  }
};

Result<std::unique_ptr<ReadStream>> ReadStream::make(FileSystem& fs, int64_t buffer_nbytes,
                                                     int64_t block_nbytes, int threads) {
  if (block_nbytes < 4 * kReadAlignment) {
    return invalid_argument("block size ", block_nbytes, " is less than ", 4 * kReadAlignment);
  }
  // Every lane needs two blocks to overlap reading and copying.
  const int64_t most_lanes = std::max<int64_t>(buffer_nbytes / (2 * block_nbytes), 1);
  const int64_t lane_count = std::clamp<int64_t>(threads, 1, most_lanes);
  const int64_t lane_nbytes = buffer_nbytes / lane_count;
  RETURN_IF_ERROR(BufferPool::check(lane_nbytes, block_nbytes));
  return std::unique_ptr<ReadStream>(
      new ReadStream(fs, static_cast<size_t>(lane_count), lane_nbytes, block_nbytes));
}

void ReadStream::release() {
  for (Lane& lane : lanes_) {
    lane.queue.reset();
    lane.pool.reset();
  }
}

// Creates the pool and the queue of a lane. `for_device` is a range whose device prefers certain
// memory; nullptr allows any memory.
Status ReadStream::open(Lane& lane, const WantedRange* for_device) {
  if (lane.pool != nullptr && (lane.for_device || for_device == nullptr)) return ok_status();
  lane.queue.reset();
  lane.pool.reset();  // Before the next allocation: the budget covers one pool.
  ASSIGN_OR_RETURN(auto pool, make_pool_for(for_device, lane_nbytes_, block_nbytes_));
  lane.queue = fs_.make_queue(pool->block_count());
  lane.pool = std::move(pool);
  lane.for_device = for_device != nullptr;
  return ok_status();
}

int64_t ReadStream::max_aligned_range_nbytes(const FileSums* sums) const {
  const int64_t shared = std::min(block_nbytes_, std::max(kSharedNbytes, 4 * grain_of(sums)));
  const int64_t most = shares_all() ? shared : block_nbytes_;
  return align_down(align_up(most, kReadAlignment), grain_of(sums));
}

int64_t ReadStream::max_range_nbytes(const FileSums* sums) const {
  return max_aligned_range_nbytes(sums) - 2 * grain_of(sums);
}

bool ReadStream::shares_all() const { return !fs_.traits().reads_in_place; }

Status ReadStream::run(std::span<const WantedRange> wanted, const ConsumeRange& consume) {
  // A direct read may begin and end at other offsets than what is wanted. A store has none.
  const int64_t most = shares_all() ? align_down(block_nbytes_, kReadAlignment)
                                    : align_up(block_nbytes_, kReadAlignment) - 2 * kReadAlignment;
  Work work(wanted, consume, most, fs_.traits().max_gap_nbytes, shares_all(), cancelled_, counts_);
  for (const Task& task : work.tasks) counts_.expect(task.range.nbytes());
  std::vector<std::thread> threads;
  const size_t lanes = std::min(lanes_.size(), work.tasks.size());
  if (lanes == 0) return ok_status();
  const WantedRange* const for_device = first_for_device(wanted);
  for (size_t i = 0; i < lanes; ++i) RETURN_IF_ERROR(open(lanes_[i], for_device));
  for (size_t i = 1; i < lanes; ++i) {
    try {
      threads.emplace_back([&lane = lanes_[i], &work] { run_lane_to_end(lane, work); });
    } catch (const std::system_error&) {
      break;  // The system has no more threads: the running lanes do all the work.
    }
  }
  run_lane_to_end(lanes_.front(), work);
  for (std::thread& thread : threads) thread.join();
  return work.status;
}

// One thread's run: submits tasks until none is left, with at most one in flight per block.
class ReadStream::LaneRun {
 public:
  LaneRun(Lane& lane, Work& work)
      : pool_(*lane.pool),
        queue_(*lane.queue),
        work_(work),
        for_device_(lane.for_device),
        slots_(static_cast<size_t>(pool_.block_count())) {
    for (size_t i = 0; i < slots_.size(); ++i) free_slots_.push_back(i);
  }

  void run() {
    while (true) {
      return_unpacked();
      while (!work_.must_stop() && !free_slots_.empty() && queue_.room() > 0) {
        if (!submit_next()) break;
      }
      // If the device still reads from most blocks, wait for it. Otherwise too few blocks would be
      // available for reads.
      const auto unpacking = std::ssize(unpacking_);
      if (unpacking > 0 &&
          (queue_.in_flight() == 0 || (free_slots_.empty() && unpacking > queue_.in_flight()))) {
        finish(unpacking_.front());
        unpacking_.pop_front();
      } else if (queue_.in_flight() > 0) {
        const IoRequest::Kind kind = IoRequest::Kind::kRead;
        for (const IoDone& done : work_.counts.wait(queue_, kind, path_in_flight())) {
          complete(done);
        }
      } else {
        return;
      }
    }
  }

 private:
  // A read between its submission and the end of its unpacking.
  struct InFlight {
    const Task* task = nullptr;
    bool is_in_queue = false;
    int block = -1;      // -1 for a read in place.
    int64_t offset = 0;  // File offset of the first byte of `memory`.
    MutableBytes memory;
    Window received;              // The bytes, if they are not in `memory`.
    int64_t verified_nbytes = 0;  // Of `memory`, from the beginning: read and verified.
    Unpacking unpacking;
  };

  const std::string& path_in_flight() const;
  bool prepare_for_direct();
  Status read_cached_parts(InFlight& read);
  bool submit_next();
  void complete(const IoDone& done);
  void finish(size_t slot);
  void return_unpacked();

  BufferPool& pool_;
  IoQueue& queue_;
  Work& work_;
  const bool for_device_;
  std::vector<InFlight> slots_;
  std::vector<size_t> free_slots_;
  std::deque<size_t> unpacking_;  // Slots whose reads are done and whose copies may be in progress.
};

// Returns the path of a file with a read in flight. Requires: there is one.
const std::string& ReadStream::LaneRun::path_in_flight() const {
  const auto is_in_queue = [](const InFlight& read) { return read.is_in_queue; };
  return std::ranges::find_if(slots_, is_in_queue)->task->file->path();
}

// Prepares the pool for direct reads. Cached reads use few of its pages, so they do not need it.
bool ReadStream::LaneRun::prepare_for_direct() {
  if (const Status status = pool_.populate(); !status.ok()) {
    work_.fail(status);
    return false;
  }
  queue_.register_memory(pool_.arena());
  return true;
}

// Reads and verifies all parts of a cached read in place except the last one, which the queue
// reads.
Status ReadStream::LaneRun::read_cached_parts(InFlight& read) {
  const Task& task = *read.task;
  const FileSums* const sums = work_.wanted_of(task.first).sums;
  if (sums == nullptr) return ok_status();
  const int64_t part = align_up(kCachedPartNbytes, sums->block_nbytes);
  while (ssize(read.memory) - read.verified_nbytes > part && !work_.must_stop()) {
    const int64_t offset = read.offset + read.verified_nbytes;
    const MutableBytes memory = slice(read.memory, read.verified_nbytes, part);
    const Status status = task.file->read(offset, memory);
    if (!status.ok()) return work_.with_name(task, status);
    RETURN_IF_ERROR(work_.check_blocks(task, offset, memory));
    read.verified_nbytes += part;
  }
  return ok_status();
}

// Returns whether to submit more reads before handling completed ones.
bool ReadStream::LaneRun::submit_next() {
  const size_t next = work_.next_task++;
  if (next >= work_.tasks.size()) return false;
  const Task& task = work_.tasks[next];
  const int64_t alignment = task.file->alignment();
  const bool resident = task.file->is_resident(task.range.begin, task.range.nbytes());
  const bool buffered = alignment == 1 || resident;
  const bool fits = task.range.begin % alignment == 0 && task.range.nbytes() % alignment == 0 &&
                    is_aligned(task.destination, alignment);
  InFlight read;
  read.task = &task;
  read.offset = task.range.begin;
  if (task.destination != nullptr && (buffered || fits)) {
    read.memory = {task.destination, static_cast<size_t>(task.range.nbytes())};
    if (resident) {
      if (const Status status = read_cached_parts(read); !status.ok()) {
        work_.fail(status);
        return false;
      }
    }
  } else {
    const int64_t grain = buffered ? 1 : alignment;
    read.block = *pool_.acquire();  // There are as many blocks as slots.
    read.offset = align_down(task.range.begin, grain);
    const int64_t nbytes = align_up(task.range.end, grain) - read.offset;
    if (nbytes > pool_.block_nbytes()) {
      pool_.release(read.block);
      work_.fail(internal_error("a read of ", nbytes, " bytes does not fit its buffer"));
      return false;
    }
    read.memory = slice(pool_.block(read.block), 0, nbytes);
    if (!buffered && !prepare_for_direct()) {
      pool_.release(read.block);
      return false;
    }
  }
  const size_t slot = free_slots_.back();
  free_slots_.pop_back();
  const IoRequest request = {
      .kind = IoRequest::Kind::kRead,
      .file = task.file,
      .offset = read.offset + read.verified_nbytes,
      .memory = slice(read.memory, read.verified_nbytes, ssize(read.memory) - read.verified_nbytes),
      .caching = buffered ? Caching::kBuffered : Caching::kDirect,
      .tag = slot,
      // A device copies from the memory of the pool, and the CPU from any.
      .received = for_device_ ? nullptr : &slots_[slot].received};
  read.is_in_queue = true;
  slots_[slot] = std::move(read);
  work_.counts.submit(queue_, request);
  // A cached read completes at once. Consume its bytes while they are in the processor's cache. A
  // read from a store is no direct one either, and takes long.
  return !buffered || work_.shares_all;
}

void ReadStream::LaneRun::complete(const IoDone& done) {
  InFlight& read = slots_[done.tag];
  read.is_in_queue = false;
  work_.counts.add_done(read.task->range.nbytes());
  Status status;
  if (!done.status.ok()) {
    status = work_.with_name(*read.task, done.status);
  } else if (!work_.stopped) {
    const Bytes bytes = read.received.bytes.empty() ? Bytes(read.memory) : read.received.bytes;
    read.unpacking = Unpacking(bytes);
    status =
        work_.consume_task(*read.task, bytes, read.offset, read.verified_nbytes, read.unpacking);
  }
  if (!status.ok()) work_.fail(status);
  unpacking_.push_back(done.tag);
  return_unpacked();
}

// Waits until a slot is unpacked, and frees it.
void ReadStream::LaneRun::finish(size_t slot) {
  InFlight& read = slots_[slot];
  const Status status = read.unpacking.wait();
  if (!status.ok()) work_.fail(status);
  if (read.block >= 0) pool_.release(read.block);
  read = {};
  free_slots_.push_back(slot);
}

void ReadStream::LaneRun::return_unpacked() {
  std::erase_if(unpacking_, [this](size_t slot) {
    const Result<bool> done = slots_[slot].unpacking.done();
    if (done.ok() && !*done) return false;
    finish(slot);  // Reports the error of a failed copy.
    return true;
  });
}

// Catches every exception, because one that leaves a thread would end the process. Waits for the
// reads in flight, because they write to the caller's memory and to the slots of the run.
void ReadStream::run_lane_to_end(Lane& lane, Work& work) {
  std::optional<LaneRun> run;
  try {
    run.emplace(lane, work);
    run->run();
  } catch (const std::exception& error) {
    work.fail(internal_error("cannot continue reading: ", error.what()));
    while (lane.queue->in_flight() > 0) (void)lane.queue->wait();
  }
}

}  // namespace torch_ckpt
