#include "engine/save/file_job.h"

#include <optional>
#include <utility>

namespace torch_ckpt {
namespace {

// The tag of a write from memory that is not the pool's; others have the numbers of their blocks.
constexpr uint64_t kInPlace = ~uint64_t{0};

}  // namespace

FileJob::FileJob(FileSystem& fs, std::string path, BufferPool& pool, const SaveOptions& options)
    : fs_(fs), path_(std::move(path)), pool_(pool), options_(options) {}

Status FileJob::open(OpenMode mode) {
  holds_pool_ = pool_.claim();
  if (!holds_pool_) {
    return invalid_argument("cannot write ", path_, ": another save is using the same buffers");
  }
  ASSIGN_OR_RETURN(file_, fs_.open(path_, mode, options_.caching));
  queue_ = fs_.make_queue(pool_.block_count(), pool_.arena());
  mode_ = {queue_->mode(), file_->alignment() > 1, file_->fallback_reason()};
  return ok_status();
}

Status FileJob::acquire(int* block) {
  std::optional<int> free = pool_.acquire();
  for (; !free; free = pool_.acquire()) RETURN_IF_ERROR(wait_for_some());
  *block = *free;
  return ok_status();
}

Status FileJob::submit(int64_t offset, MutableBytes memory, int block) {
  while (queue_->room() == 0) RETURN_IF_ERROR(wait_for_some());
  const bool in_place = block == kNoBlock;
  const IoRequest request = {.kind = IoRequest::Kind::kWrite,
                             .file = file_.get(),
                             .offset = offset,
                             .memory = memory,
                             .caching = options_.caching,
                             .tag = in_place ? kInPlace : static_cast<uint64_t>(block)};
  if (in_place) ++in_place_;
  if (block == block_) block_ = kNoBlock;
  queue_->submit({&request, 1});
  return ok_status();
}

Status FileJob::wait_for_some() {
  if (queue_->in_flight() == 0) {
    return internal_error("the buffers for ", path_, " are all held by another job");
  }
  Status first;
  for (const IoDone& done : queue_->wait()) {
    if (done.tag == kInPlace) {
      --in_place_;
    } else {
      pool_.release(static_cast<int>(done.tag));
    }
    if (first.ok()) first = done.status;
  }
  return first;
}

Status FileJob::wait_for_all() {
  while (queue_->in_flight() > 0) RETURN_IF_ERROR(wait_for_some());
  return ok_status();
}

Status FileJob::sync() {
  if (!options_.sync) return ok_status();
  const IoRequest request = {.kind = IoRequest::Kind::kSync, .file = file_.get()};
  queue_->submit({&request, 1});
  for (const IoDone& done : queue_->wait()) RETURN_IF_ERROR(done.status);
  return ok_status();
}

bool FileJob::stop_writes() {
  // Blocks in flight belong to the pool, which other jobs use next: none may still be written from.
  while (queue_ && queue_->in_flight() > 0) (void)wait_for_some();
  if (block_ != kNoBlock) pool_.release(block_);
  block_ = kNoBlock;
  let_go();
  const bool was_open = file_ != nullptr;
  file_.reset();
  (void)fail(cancelled("the job of ", path_, " has been given up"));
  return was_open;
}

// The queue goes first: it may have registered the pool's memory.
void FileJob::let_go() {
  queue_.reset();
  if (holds_pool_) pool_.unclaim();
  holds_pool_ = false;
}

Status FileJob::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
  return status_;
}

Status FileJob::check_open() const {
  return finished_ ? invalid_argument("the job of ", path_, " is finished") : status_;
}

}  // namespace torch_ckpt
