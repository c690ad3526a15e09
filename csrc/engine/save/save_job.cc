#include "engine/save/save_job.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc.h"
#include "format/zip_frame.h"

namespace torch_ckpt {
namespace {

// Each chunk is packed and checksummed while it is in the second-level cache. A multiple of every
// element size.
constexpr int64_t kPackChunk = int64_t{128} << 10;

// Runs of at least this length are written from the tensor's memory if alignment allows it.
constexpr int64_t kInPlaceNbytes = int64_t{256} << 10;

static_assert(kSmallAlignment % kFrameAlignment == 0, "a slice must start where frames expect");
static_assert(kSmallAlignment % kMaxItemsize == 0, "a window must not begin within an element");

}  // namespace

Result<SliceNbytes> slice_nbytes(DType dtype, const Dims& sizes) {
  ASSIGN_OR_RETURN(const TensorFrame frame, TensorFrame::make(dtype, sizes));
  return SliceNbytes{frame.head_nbytes(), frame.payload_nbytes(), frame.tail_nbytes()};
}

SaveJob::SaveJob(FileSystem& fs, std::string path, Layout layout, BufferPool& pool,
                 const SaveOptions& options)
    : FileJob(fs, std::move(path), pool, options),
      layout_(std::move(layout)),
      end_(layout_.nbytes),
      summer_(options.sum_block_nbytes) {}

Result<std::unique_ptr<SaveJob>> SaveJob::start(FileSystem& fs, const std::string& path,
                                                Layout layout, BufferPool& pool,
                                                const SaveOptions& options) {
  std::unique_ptr<SaveJob> job(new SaveJob(fs, path, std::move(layout), pool, options));
  job->counts_.expect(job->end_);
  RETURN_IF_ERROR(job->open(OpenMode::kCreate));
  if (job->end_ > 0) RETURN_IF_ERROR(job->file_->preallocate(job->end_));
  return job;
}

void SaveJob::abort() {
  // Best effort: no metadata refers to a file that cannot be removed.
  if (stop_writes() && !finished_) (void)fs_.remove(path_);
}

Status SaveJob::write(int64_t index, const LiveTensor& tensor, Digest128* digest) {
  RETURN_IF_ERROR(check_open());
  if (index < next_index_ || index >= static_cast<int64_t>(layout_.slices.size())) {
    return fail(invalid_argument("cannot write slice ", index, " of ", path_, ": slice ",
                                 next_index_, " of ", layout_.slices.size(), " is next"));
  }
  next_index_ = index + 1;
  digests_ = digest != nullptr;
  RETURN_IF_ERROR(fail(write_framed(layout_.slices[static_cast<size_t>(index)], tensor)));
  if (digests_) *digest = digest_.finish();
  return ok_status();
}

Status SaveJob::write_framed(const Slice& slice, const LiveTensor& tensor) {
  ASSIGN_OR_RETURN(const TensorFrame frame, TensorFrame::make(tensor.dtype, tensor.sizes));
  if (frame.head_nbytes() != slice.nbytes.head || frame.payload_nbytes() != slice.nbytes.payload ||
      frame.tail_nbytes() != slice.nbytes.tail) {
    return invalid_argument("cannot write '", tensor.name, "', ", dtype_info(tensor.dtype).name,
                            " of sizes ", to_string(tensor.sizes), ": its slice has ",
                            slice.nbytes.payload, " payload bytes");
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
  int64_t packed = 0;
  while (done < nbytes) {
    if (const int64_t run = contiguous ? in_place_nbytes(tensor, done, nbytes) : 0; run > 0) {
      ASSIGN_OR_RETURN(crc, write_in_place({tensor.data + done, static_cast<size_t>(run)}, crc));
      done += run;
      continue;
    }
    // The rest of a window has whole elements: `window_rest` requires windows to begin so.
    ASSIGN_OR_RETURN(const MutableBytes rest, window_rest());
    const int64_t count = std::min({nbytes - done, ssize(rest), kPackChunk});
    if (contiguous) {
      const Bytes from(tensor.data + done, static_cast<size_t>(count));
      crc = copy_and_checksum(from, slice(rest, 0, count), crc);
    } else {
      // Pack a whole window: many rows of a transposed tensor share each line of its memory.
      if (done == packed) {
        packed += std::min(nbytes - done, ssize(rest));
        pack_elements(tensor, done / size, packed / size, slice(rest, 0, packed - done));
      }
      crc = crc32(crc, slice(rest, 0, count));
    }
    if (digests_) digest_.update(slice(rest, 0, count));
    done += count;
    fill(count);
  }
  return crc;
}

// Returns how many bytes to write from the memory of a contiguous tensor, from `done` to at most
// `nbytes`.
int64_t SaveJob::in_place_nbytes(const LiveTensor& tensor, int64_t done, int64_t nbytes) const {
  if (tensor.device != &cpu_device()) return 0;
  if (!fs_.traits().writes_at_offsets) {
    // A stream holds memory of a part until more bytes follow, unless the part is whole.
    const int64_t part = pool_.block_nbytes();
    return cursor_ % part == 0 && part >= file_->part_nbytes() ? align_down(nbytes - done, part)
                                                               : 0;
  }
  const int64_t alignment = file_->alignment();
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  if (done > 0 || cursor_ % alignment != 0 || address % static_cast<uintptr_t>(alignment) != 0) {
    return 0;
  }
  const int64_t run = align_down(nbytes, std::max(alignment, kSmallAlignment));
  return run < kInPlaceNbytes ? 0 : run;
}

// Submits writes from the tensor's memory, and returns the CRC-32 of the bytes after `crc`.
Result<uint32_t> SaveJob::write_in_place(Bytes bytes, uint32_t crc) {
  if (block_ != kNoBlock) RETURN_IF_ERROR(submit_window());
  while (!bytes.empty()) {
    const Bytes run = slice(bytes, 0, std::min(ssize(bytes), pool_.block_nbytes()));
    // A write request only reads this memory.
    const MutableBytes memory(const_cast<std::byte*>(run.data()), run.size());
    RETURN_IF_ERROR(submit(cursor_, memory, kNoBlock));
    for (int64_t begin = 0; begin < ssize(run); begin += kPackChunk) {
      const Bytes chunk = slice(run, begin, std::min(kPackChunk, ssize(run) - begin));
      crc = crc32(crc, chunk);
      if (digests_) digest_.update(chunk);
      summer_.append(chunk);
    }
    cursor_ += ssize(run);
    bytes = bytes.subspan(run.size());
  }
  return crc;
}

Status SaveJob::settle() {
  // Wait after an error too, because the caller then frees the memory.
  while (is_writing_in_place()) {
    if (!fail(check_open()).ok()) file_->abandon();
    (void)fail(wait_for_some());
  }
  return check_open();
}

Result<Slice> SaveJob::append(Bytes bytes) {
  RETURN_IF_ERROR(check_open());
  const SliceNbytes nbytes = {0, ssize(bytes), 0};
  const Slice slice = {next_slice_offset(end_, nbytes), nbytes};
  next_index_ = static_cast<int64_t>(layout_.slices.size());
  RETURN_IF_ERROR(fail(put_zeros_until(slice.offset)));
  RETURN_IF_ERROR(fail(put(bytes)));
  counts_.expect(slice.end() - end_);
  end_ = slice.end();
  return slice;
}

Status SaveJob::put(Bytes bytes) {
  while (!bytes.empty()) {
    ASSIGN_OR_RETURN(const MutableBytes rest, window_rest());
    const int64_t count = std::min(ssize(bytes), ssize(rest));
    std::memcpy(rest.data(), bytes.data(), static_cast<size_t>(count));
    fill(count);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return ok_status();
}

Status SaveJob::put_zeros_until(int64_t offset) {
  while (cursor_ < offset) {
    ASSIGN_OR_RETURN(const MutableBytes rest, window_rest());
    const int64_t count = std::min(offset - cursor_, ssize(rest));
    std::memset(rest.data(), 0, static_cast<size_t>(count));
    fill(count);
  }
  return ok_status();
}

// Returns the unfilled rest of the current window, which is never empty. Submits a full window and
// starts a new one. Windows begin at multiples of kSmallAlignment, also without direct I/O: blocks
// have whole pages, so no window ends within an element.
Result<MutableBytes> SaveJob::window_rest() {
  if (block_ != kNoBlock && filled_ == pool_.block_nbytes()) RETURN_IF_ERROR(submit_window());
  if (block_ == kNoBlock) {
    if (cursor_ % kSmallAlignment != 0) {
      return internal_error("cannot write ", path_, ": a window would begin at ", cursor_,
                            ", which is not a multiple of ", kSmallAlignment);
    }
    RETURN_IF_ERROR(acquire(&block_));
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
  // Pad the last window to the alignment of direct I/O. `finish` truncates the file.
  const int64_t nbytes = align_up(filled_, file_->alignment());
  const MutableBytes block = pool_.block(block_);
  std::memset(block.data() + filled_, 0, static_cast<size_t>(nbytes - filled_));
  return submit(cursor_ - filled_, slice(block, 0, nbytes), block_);
}

Status SaveJob::finish() {
  RETURN_IF_ERROR(check_open());
  RETURN_IF_ERROR(fail(put_zeros_until(end_)));
  if (block_ != kNoBlock) RETURN_IF_ERROR(fail(submit_window()));
  RETURN_IF_ERROR(fail(complete(end_)));
  sums_ = summer_.finish();
  finished_ = true;
  release();
  return ok_status();
}

}  // namespace torch_ckpt
