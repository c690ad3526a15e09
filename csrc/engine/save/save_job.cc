#include "engine/save/save_job.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc.h"
#include "format/zip_frame.h"

namespace torch_ckpt {
namespace {

// Tensors are packed and then summed in chunks that stay in the second-level cache. A multiple of
// every element size.
constexpr int64_t kPackChunk = int64_t{128} << 10;

// Runs at least this long are written from where they lie, if they can be.
constexpr int64_t kInPlaceNbytes = int64_t{256} << 10;

// Of such a write; others have the numbers of their blocks.
constexpr uint64_t kInPlace = ~uint64_t{0};

static_assert(kSmallAlignment % kFrameAlignment == 0, "a slice must start where frames expect");

}  // namespace

Result<SliceNbytes> slice_nbytes(DType dtype, const Dims& sizes) {
  ASSIGN_OR_RETURN(const TensorFrame frame, TensorFrame::make(dtype, sizes));
  return SliceNbytes{frame.head_nbytes(), frame.payload_nbytes(), frame.tail_nbytes()};
}

SaveJob::SaveJob(FileSystem& fs, std::string path, Layout layout, BufferPool& pool,
                 const SaveOptions& options)
    : fs_(fs),
      path_(std::move(path)),
      layout_(std::move(layout)),
      pool_(pool),
      options_(options),
      summer_(options.sum_block_nbytes) {}

Result<std::unique_ptr<SaveJob>> SaveJob::start(FileSystem& fs, const std::string& path,
                                                Layout layout, BufferPool& pool,
                                                const SaveOptions& options) {
  if (!pool.claim()) {
    return invalid_argument("cannot write ", path, ": another save is using the same buffers");
  }
  std::unique_ptr<SaveJob> job(new SaveJob(fs, path, std::move(layout), pool, options));
  RETURN_IF_ERROR(job->open());
  return job;
}

Status SaveJob::open() {
  ASSIGN_OR_RETURN(file_, fs_.open(path_, OpenMode::kCreate, options_.caching));
  queue_ = fs_.make_queue(pool_.block_count(), pool_.arena());
  end_ = layout_.nbytes;
  mode_ = {queue_->mode(), file_->alignment() > 1, file_->fallback_reason()};
  if (end_ > 0) RETURN_IF_ERROR(fail(file_->preallocate(end_)));
  return ok_status();
}

SaveJob::~SaveJob() { abort(); }

void SaveJob::abort() {
  // Blocks in flight belong to the pool, which other jobs use next: none may still be written from.
  while (queue_ && queue_->in_flight() > 0) (void)wait_for_some();
  if (block_ >= 0) pool_.release(block_);
  block_ = -1;
  let_go();
  const bool created = file_ != nullptr;
  file_.reset();
  // Best effort: a file that cannot be removed is not referred to by any metadata.
  if (created && !finished_) (void)fs_.remove(path_);
  (void)fail(cancelled("the job of ", path_, " has been given up"));
}

// The queue goes first: it may have registered the pool's memory.
void SaveJob::let_go() {
  queue_.reset();
  if (holds_pool_) pool_.unclaim();
  holds_pool_ = false;
}

Status SaveJob::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
  return status_;
}

Status SaveJob::check_open() {
  return finished_ ? invalid_argument("the job of ", path_, " is finished") : status_;
}

Status SaveJob::write(int64_t index, const LiveTensor& tensor) {
  RETURN_IF_ERROR(check_open());
  if (index < next_index_ || index >= static_cast<int64_t>(layout_.slices.size())) {
    return fail(invalid_argument("slice ", index, " of ", path_, " is not the next of ",
                                 layout_.slices.size(), " slices"));
  }
  next_index_ = index + 1;
  return fail(write_framed(layout_.slices[static_cast<size_t>(index)], tensor));
}

Status SaveJob::write_framed(const Slice& slice, const LiveTensor& tensor) {
  ASSIGN_OR_RETURN(const TensorFrame frame, TensorFrame::make(tensor.dtype, tensor.sizes));
  if (frame.head_nbytes() != slice.nbytes.head || frame.payload_nbytes() != slice.nbytes.payload ||
      frame.tail_nbytes() != slice.nbytes.tail) {
    return invalid_argument("tensor ", tensor.name, " of ", dtype_info(tensor.dtype).name, " ",
                            to_string(tensor.sizes), " does not fit the slice of ",
                            slice.nbytes.payload, " payload bytes laid out for it");
  }
  RETURN_IF_ERROR(put_zeros_until(slice.offset));

  std::vector<std::byte> edge(
      static_cast<size_t>(std::max(frame.head_nbytes(), frame.tail_nbytes())));
  const MutableBytes head(edge.data(), static_cast<size_t>(frame.head_nbytes()));
  frame.write_head(head);
  RETURN_IF_ERROR(put(head));

  ASSIGN_OR_RETURN(const uint32_t crc, put_payload(tensor, frame.payload_nbytes()));

  const MutableBytes tail(edge.data(), static_cast<size_t>(frame.tail_nbytes()));
  frame.write_tail(crc, tail);
  return put(tail);
}

Result<uint32_t> SaveJob::put_payload(const LiveTensor& tensor, int64_t nbytes) {
  const int64_t size = itemsize(tensor.dtype);
  const bool contiguous = is_contiguous(tensor);
  uint32_t crc = 0;
  int64_t done = 0;
  if (contiguous && can_write_in_place(tensor)) {
    done = align_down(nbytes, file_->alignment());
    if (done < kInPlaceNbytes) done = 0;
    ASSIGN_OR_RETURN(crc, write_in_place({tensor.data, static_cast<size_t>(done)}));
  }
  while (done < nbytes) {
    // A window holds whole elements: payload and windows both begin at multiples of 64.
    ASSIGN_OR_RETURN(const MutableBytes rest, window_rest());
    const int64_t part = std::min({nbytes - done, ssize(rest), kPackChunk});
    if (contiguous) {
      const Bytes from(tensor.data + done, static_cast<size_t>(part));
      crc = copy_and_checksum(from, slice(rest, 0, part), crc);
    } else {
      const MutableBytes out = slice(rest, 0, part);
      pack_elements(tensor, done / size, (done + part) / size, out);
      crc = crc32(crc, out);
    }
    done += part;
    fill(part);
  }
  return crc;
}

// Whether the next byte of the file and the first of the tensor are at places that the disk takes.
bool SaveJob::can_write_in_place(const LiveTensor& tensor) const {
  const int64_t alignment = file_->alignment();
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  return tensor.device == &cpu_device() && cursor_ % alignment == 0 &&
         address % static_cast<uintptr_t>(alignment) == 0;
}

// Returns their CRC-32.
Result<uint32_t> SaveJob::write_in_place(Bytes bytes) {
  if (block_ >= 0 && !bytes.empty()) RETURN_IF_ERROR(submit_window());
  uint32_t crc = 0;
  while (!bytes.empty()) {
    const Bytes part = slice(bytes, 0, std::min(ssize(bytes), pool_.block_nbytes()));
    while (queue_->room() == 0) RETURN_IF_ERROR(wait_for_some());
    // The queue only reads what it writes.
    const MutableBytes memory(const_cast<std::byte*>(part.data()), part.size());
    const IoRequest request = {.kind = IoRequest::Kind::kWrite,
                               .file = file_.get(),
                               .offset = cursor_,
                               .memory = memory,
                               .caching = options_.caching,
                               .tag = kInPlace};
    queue_->submit({&request, 1});
    ++in_place_;
    for (int64_t begin = 0; begin < ssize(part); begin += kPackChunk) {
      const Bytes chunk = slice(part, begin, std::min(kPackChunk, ssize(part) - begin));
      crc = crc32(crc, chunk);
      summer_.append(chunk);
    }
    cursor_ += ssize(part);
    bytes = bytes.subspan(part.size());
  }
  return crc;
}

Status SaveJob::settle() {
  // After an error, too: the memory is let go then.
  while (in_place_ > 0 && queue_->in_flight() > 0) (void)fail(wait_for_some());
  return check_open();
}

Result<Slice> SaveJob::append(Bytes bytes) {
  RETURN_IF_ERROR(check_open());
  const SliceNbytes nbytes = {0, ssize(bytes), 0};
  const Slice slice = {next_slice_offset(end_, nbytes), nbytes};
  next_index_ = static_cast<int64_t>(layout_.slices.size());
  RETURN_IF_ERROR(fail(put_zeros_until(slice.offset)));
  RETURN_IF_ERROR(fail(put(bytes)));
  end_ = slice.end();
  return slice;
}

Status SaveJob::put(Bytes bytes) {
  while (!bytes.empty()) {
    ASSIGN_OR_RETURN(const MutableBytes rest, window_rest());
    const int64_t part = std::min(ssize(bytes), ssize(rest));
    std::memcpy(rest.data(), bytes.data(), static_cast<size_t>(part));
    fill(part);
    bytes = bytes.subspan(static_cast<size_t>(part));
  }
  return ok_status();
}

Status SaveJob::put_zeros_until(int64_t offset) {
  while (cursor_ < offset) {
    ASSIGN_OR_RETURN(const MutableBytes rest, window_rest());
    const int64_t part = std::min(offset - cursor_, ssize(rest));
    std::memset(rest.data(), 0, static_cast<size_t>(part));
    fill(part);
  }
  return ok_status();
}

// The unfilled part of the current window, never empty: a full window is handed to the queue and a
// new one begun.
Result<MutableBytes> SaveJob::window_rest() {
  if (block_ >= 0 && filled_ == pool_.block_nbytes()) RETURN_IF_ERROR(submit_window());
  if (block_ < 0) {
    std::optional<int> free = pool_.acquire();
    for (; !free; free = pool_.acquire()) RETURN_IF_ERROR(wait_for_some());
    block_ = *free;
    filled_ = 0;
  }
  return slice(pool_.block(block_), filled_, pool_.block_nbytes() - filled_);
}

// Counts the next bytes of the window as filled.
void SaveJob::fill(int64_t nbytes) {
  summer_.append(slice(pool_.block(block_), filled_, nbytes));
  filled_ += nbytes;
  cursor_ += nbytes;
}

Status SaveJob::submit_window() {
  while (queue_->room() == 0) RETURN_IF_ERROR(wait_for_some());
  // The last window ends where the data does: fill it up to what direct I/O needs; `finish` cuts
  // the file back.
  const int64_t nbytes = align_up(filled_, file_->alignment());
  const MutableBytes block = pool_.block(block_);
  std::memset(block.data() + filled_, 0, static_cast<size_t>(nbytes - filled_));
  const IoRequest request = {.kind = IoRequest::Kind::kWrite,
                             .file = file_.get(),
                             .offset = cursor_ - filled_,
                             .memory = slice(block, 0, nbytes),
                             .caching = options_.caching,
                             .tag = static_cast<uint64_t>(block_)};
  block_ = -1;
  queue_->submit({&request, 1});
  return ok_status();
}

Status SaveJob::wait_for_some() {
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

Status SaveJob::finish() {
  RETURN_IF_ERROR(check_open());
  RETURN_IF_ERROR(fail(put_zeros_until(end_)));
  if (block_ >= 0) RETURN_IF_ERROR(fail(submit_window()));
  while (queue_->in_flight() > 0) RETURN_IF_ERROR(fail(wait_for_some()));
  RETURN_IF_ERROR(fail(file_->truncate(end_)));
  if (options_.sync) {
    const IoRequest request = {.kind = IoRequest::Kind::kSync, .file = file_.get()};
    queue_->submit({&request, 1});
    for (const IoDone& done : queue_->wait()) RETURN_IF_ERROR(fail(done.status));
  }
  sums_ = summer_.finish();
  finished_ = true;
  let_go();
  return ok_status();
}

}  // namespace torch_ckpt
