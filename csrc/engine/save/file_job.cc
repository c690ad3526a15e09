#include "engine/save/file_job.h"

#include <optional>
#include <utility>

namespace torch_ckpt {
namespace {

// The tag of a write is its block in the pool, or kInPlace, and above these bits its length.
constexpr int kBlockBits = 24;
constexpr uint64_t kInPlace = (uint64_t{1} << kBlockBits) - 1;  // Memory outside the pool.

constexpr uint64_t kSync = kInPlace - 1;  // Tag of a sync.

}  // namespace

FileJob::FileJob(FileSystem& fs, std::string path, BufferPool& pool, const SaveOptions& options)
    : fs_(fs), path_(std::move(path)), pool_(pool), options_(options) {}

Status FileJob::open(OpenMode mode) {
  owns_pool_ = pool_.claim();
  if (!owns_pool_) {
    return invalid_argument("cannot write ", path_, ": another save is using the same buffers");
  }
  ASSIGN_OR_RETURN(file_, fs_.open(path_, mode, options_.caching));
  queue_ = fs_.make_queue(pool_.block_count());
  // A stream may use few of the buffers: most bytes are written from the memory of tensors.
  if (fs_.traits().writes_at_offsets) RETURN_IF_ERROR(pool_.populate());
  queue_->register_memory(pool_.arena());
  mode_ = {queue_->mode(), file_->alignment() > 1, file_->fallback_reason()};
  return ok_status();
}

Status FileJob::acquire(int* block) {
  RETURN_IF_ERROR(check_cancelled());
  std::optional<int> free = pool_.acquire();
  for (; !free; free = pool_.acquire()) {
    RETURN_IF_ERROR(wait_for_some());
    RETURN_IF_ERROR(check_cancelled());
  }
  *block = *free;
  return ok_status();
}

Status FileJob::submit(int64_t offset, MutableBytes memory, int block) {
  while (queue_->room() == 0) RETURN_IF_ERROR(wait_for_some());
  RETURN_IF_ERROR(check_cancelled());
  const bool in_place = block == kNoBlock;
  const IoRequest request = {
      .kind = IoRequest::Kind::kWrite,
      .file = file_.get(),
      .offset = offset,
      .memory = memory,
      .caching = options_.caching,
      .tag = (in_place ? kInPlace : static_cast<uint64_t>(block)) | memory.size() << kBlockBits};
  if (in_place) ++in_place_;
  if (block == block_) block_ = kNoBlock;
  counts_.submit(*queue_, request);
  return ok_status();
}

Status FileJob::wait_for_some() {
  if (queue_->in_flight() == 0) {
    return internal_error("cannot write ", path_, ": another job uses all buffers");
  }
  Status first;
  for (const IoDone& done : counts_.wait(*queue_, doing_, path_)) {
    const uint64_t block = done.tag & kInPlace;
    if (block == kInPlace) {
      --in_place_;
    } else if (block != kSync) {
      pool_.release(static_cast<int>(block));
    }
    counts_.add_done(static_cast<int64_t>(done.tag >> kBlockBits));
    if (first.ok()) first = done.status;
  }
  return first;
}

Status FileJob::wait_for_all() {
  while (queue_->in_flight() > 0) {
    RETURN_IF_ERROR(check_cancelled());
    RETURN_IF_ERROR(wait_for_some());
  }
  return check_cancelled();
}

Status FileJob::complete(std::optional<int64_t> nbytes) {
  const bool is_stream = !fs_.traits().writes_at_offsets;
  // The last writes to a stream are complete only once it has ended.
  if (!is_stream) {
    RETURN_IF_ERROR(wait_for_all());
    if (nbytes) RETURN_IF_ERROR(file_->truncate(*nbytes));
    if (!options_.sync) return ok_status();
  }
  while (queue_->room() == 0) RETURN_IF_ERROR(wait_for_some());
  const IoRequest request = {.kind = IoRequest::Kind::kSync,
                             .file = file_.get(),
                             .offset = nbytes.value_or(0),
                             .tag = kSync};
  doing_ = is_stream ? IoRequest::Kind::kWrite : IoRequest::Kind::kSync;
  counts_.submit(*queue_, request);
  return wait_for_all();
}

bool FileJob::stop_writes() {
  if (file_) file_->abandon();
  // Other jobs use the blocks of the pool next, so no write from them may be in flight.
  while (queue_ && queue_->in_flight() > 0) (void)wait_for_some();
  if (block_ != kNoBlock) pool_.release(block_);
  block_ = kNoBlock;
  const bool was_open = file_ != nullptr;
  release();
  (void)fail(cancelled("cannot write ", path_, ": the job was aborted"));
  return was_open;
}

// Destroys the queue first, because it may have registered the pool's memory.
void FileJob::release() {
  queue_.reset();
  file_.reset();
  if (owns_pool_) pool_.unclaim();
  owns_pool_ = false;
}

Status FileJob::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
  return status_;
}

Status FileJob::check_open() const {
  if (finished_) return invalid_argument("cannot write ", path_, ": the job is finished");
  return status_.ok() ? check_cancelled() : status_;
}

Status FileJob::check_cancelled() const {
  if (!cancelled_.load(std::memory_order_relaxed)) return ok_status();
  return cancelled("stopped writing ", path_, ": the save has failed elsewhere");
}

}  // namespace torch_ckpt
