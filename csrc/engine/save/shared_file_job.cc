#include "engine/save/shared_file_job.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "geometry/box.h"

namespace torch_ckpt {
namespace {

// Chunk in which a non-contiguous tensor is packed. A chunk has many rows: those of a transposed
// tensor share each line of its memory.
constexpr int64_t kCopyChunk = int64_t{1} << 20;

// Shorter runs go through the page cache, where the kernel merges adjacent writes into few
// requests. With direct I/O, each run would be a separate request.
constexpr int64_t kMinDirect = int64_t{256} << 10;

int64_t min_direct(const BufferPool& pool) { return std::min(kMinDirect, pool.block_nbytes() / 2); }

// Iterates over the byte runs of a box. All runs have the same length, and are adjacent in the box.
class Runs {
 public:
  Runs(const BoxPlace& place, const Dims& box_sizes, int64_t itemsize) : sizes_(box_sizes) {
    strides_ = contiguous_strides(place.tensor_sizes);
    offset_ = place.payload_offset;
    for (size_t d = 0; d < strides_.size(); ++d) {
      strides_[d] *= itemsize;
      offset_ += place.box_offsets[d] * strides_[d];
    }
    nbytes_ = itemsize;
    while (!sizes_.empty()) {
      const int64_t size = sizes_.back();
      const bool is_whole = size == place.tensor_sizes[sizes_.size() - 1];
      nbytes_ *= size;
      sizes_.pop_back();
      if (!is_whole) break;
    }
    index_.resize(sizes_.size());
  }

  int64_t nbytes() const { return nbytes_; }
  bool is_one() const { return *checked_numel(sizes_) == 1; }

  // File offset of the current run.
  int64_t offset() const { return offset_; }

  void next() {
    for (size_t d = sizes_.size(); d-- > 0;) {
      offset_ += strides_[d];
      if (++index_[d] < sizes_[d]) return;
      offset_ -= index_[d] * strides_[d];
      index_[d] = 0;
    }
  }

 private:
  Dims sizes_;    // Sizes of the dimensions outside a run.
  Dims strides_;  // Strides of the tensor in the file, in bytes.
  Dims index_;
  int64_t nbytes_ = 0;
  int64_t offset_ = 0;
};

}  // namespace

SharedFileJob::SharedFileJob(FileSystem& fs, std::string path, int64_t file_nbytes,
                             BufferPool& pool, const SaveOptions& options)
    : FileJob(fs, std::move(path), pool, options), file_nbytes_(file_nbytes) {}

Result<std::unique_ptr<SharedFileJob>> SharedFileJob::start(FileSystem& fs, const std::string& path,
                                                            int64_t file_nbytes, BufferPool& pool,
                                                            const SaveOptions& options) {
  std::unique_ptr<SharedFileJob> job(new SharedFileJob(fs, path, file_nbytes, pool, options));
  RETURN_IF_ERROR(job->open(job->is_stream() ? OpenMode::kCreate : OpenMode::kUpdate));
  RETURN_IF_ERROR(job->file_->preallocate(file_nbytes));
  return job;
}

Status SharedFileJob::write(const BoxPlace& place, const LiveTensor& tensor) {
  RETURN_IF_ERROR(check_open());
  const std::optional<int64_t> numel = checked_numel(place.tensor_sizes);
  const std::optional<int64_t> nbytes =
      numel ? checked_mul(*numel, itemsize(tensor.dtype)) : std::nullopt;
  if (!nbytes || !lies_within({place.box_offsets, tensor.sizes}, place.tensor_sizes) ||
      !range_within(place.payload_offset, *nbytes, file_nbytes_)) {
    return fail(invalid_argument("cannot write '", tensor.name, "' at ", place.payload_offset,
                                 " of ", path_, ": its box ",
                                 to_string(Box{place.box_offsets, tensor.sizes}), " of ",
                                 to_string(place.tensor_sizes), " does not lie within it"));
  }
  if (*checked_numel(tensor.sizes) == 0) return ok_status();
  return fail(write_runs(place, tensor));
}

Status SharedFileJob::write_runs(const BoxPlace& place, const LiveTensor& tensor) {
  const int64_t size = itemsize(tensor.dtype);
  const int64_t nbytes = *checked_numel(tensor.sizes) * size;
  const bool contiguous = is_contiguous(tensor);
  Runs runs(place, tensor.sizes, size);
  // Short runs of a box are not adjacent, so a window would only add a copy.
  const bool one_by_one = !is_stream() && !runs.is_one() && runs.nbytes() < min_direct(pool_);
  std::vector<std::byte> packed(contiguous ? 0 : static_cast<size_t>(std::min(nbytes, kCopyChunk)));
  int64_t in_run = 0;  // Number of written bytes of the current run.
  for (int64_t done = 0; done < nbytes;) {
    Bytes chunk(tensor.data + done, static_cast<size_t>(contiguous ? nbytes - done : 0));
    if (!contiguous) {
      const MutableBytes out(packed.data(),
                             static_cast<size_t>(std::min(nbytes - done, kCopyChunk)));
      pack_elements(tensor, done / size, (done + ssize(out)) / size, out);
      chunk = out;
    }
    done += ssize(chunk);
    while (!chunk.empty()) {
      const int64_t count = std::min(ssize(chunk), runs.nbytes() - in_run);
      const Bytes bytes = slice(chunk, 0, count);
      const int64_t offset = runs.offset() + in_run;
      if (one_by_one) RETURN_IF_ERROR(check_cancelled());
      RETURN_IF_ERROR(one_by_one ? file_->write(offset, bytes) : put_in_window(offset, bytes));
      chunk = chunk.subspan(static_cast<size_t>(count));
      in_run += count;
      if (in_run < runs.nbytes()) continue;
      runs.next();
      in_run = 0;
    }
  }
  return ok_status();
}

Status SharedFileJob::put(int64_t offset, Bytes bytes) {
  RETURN_IF_ERROR(check_open());
  if (!range_within(offset, ssize(bytes), file_nbytes_)) {
    return fail(invalid_argument("cannot write ", bytes.size(), " bytes at ", offset, " of ", path_,
                                 ": the file has ", file_nbytes_, " bytes"));
  }
  return fail(put_in_window(offset, bytes));
}

Status SharedFileJob::put_in_window(int64_t offset, Bytes bytes) {
  if (offset != cursor_) {
    if (is_stream()) {
      return invalid_argument("cannot write at ", offset, " of ", path_, ": it is a stream of ",
                              cursor_, " bytes by now");
    }
    RETURN_IF_ERROR(write_window());
  }
  while (!bytes.empty()) {
    if (block_ != kNoBlock && cursor_ == window_ + pool_.block_nbytes()) {
      RETURN_IF_ERROR(write_window());
    }
    if (block_ == kNoBlock) {
      RETURN_IF_ERROR(acquire(&block_));
      begin_ = cursor_ = offset;
      window_ = align_down(offset, file_->alignment());
    }
    const int64_t room = window_ + pool_.block_nbytes() - cursor_;
    const int64_t count = std::min(ssize(bytes), room);
    std::memcpy(pool_.block(block_).data() + (cursor_ - window_), bytes.data(),
                static_cast<size_t>(count));
    cursor_ += count;
    offset += count;
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return ok_status();
}

// Writes the bytes in the window. If the next window is adjacent, this one ends at the end of a
// block, and so at a page boundary.
Status SharedFileJob::write_window() {
  if (block_ == kNoBlock) return ok_status();
  const MutableBytes block = pool_.block(block_);
  const auto bytes_of = [&](int64_t begin, int64_t end) {
    return slice(block, begin - window_, end - begin);
  };
  if (is_stream()) return submit(begin_, bytes_of(begin_, cursor_), block_);
  const int64_t page = file_->alignment();
  const int64_t first = align_up(begin_, page);
  const int64_t last = align_down(cursor_, page);
  if (page > 1 && last - first >= min_direct(pool_)) {
    if (begin_ < first) RETURN_IF_ERROR(file_->write(begin_, bytes_of(begin_, first)));
    if (last < cursor_) RETURN_IF_ERROR(file_->write(last, bytes_of(last, cursor_)));
    return submit(first, bytes_of(first, last), block_);
  }
  RETURN_IF_ERROR(file_->write(begin_, bytes_of(begin_, cursor_)));
  pool_.release(block_);
  block_ = kNoBlock;
  return ok_status();
}

Status SharedFileJob::finish() {
  RETURN_IF_ERROR(check_open());
  RETURN_IF_ERROR(fail(write_window()));
  if (is_stream() && cursor_ != file_nbytes_) {
    return fail(invalid_argument("cannot end ", path_, " after ", cursor_, " of ", file_nbytes_,
                                 " bytes: a stream has no gaps"));
  }
  // Other ranks may still write to a file with offsets.
  RETURN_IF_ERROR(
      fail(complete(is_stream() ? std::optional<int64_t>(file_nbytes_) : std::nullopt)));
  finished_ = true;
  release();
  return ok_status();
}

}  // namespace torch_ckpt
