#include "engine/save/shared_file_job.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "geometry/box.h"

namespace torch_ckpt {
namespace {

// What a tensor without packed bytes is packed to at a time: in the second-level cache.
constexpr int64_t kPackChunk = int64_t{128} << 10;

// What is shorter goes through the page cache, where the kernel joins what ranks write to a page
// and its neighbours into few requests. Past it, each run would be a request of its own.
constexpr int64_t kLeastDirect = int64_t{256} << 10;

int64_t least_direct(const BufferPool& pool) {
  return std::min(kLeastDirect, pool.block_nbytes() / 2);
}

// Runs of a box, in bytes: all of one length, and in the box one behind the other.
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

  // Where the run begins in the file.
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
  Dims sizes_;    // Of the dimensions outside of a run.
  Dims strides_;  // Of the tensor in the file, in bytes.
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
  RETURN_IF_ERROR(job->open(OpenMode::kShare));
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
    return fail(invalid_argument("tensor ", tensor.name, " at ",
                                 to_string(Box{place.box_offsets, tensor.sizes}), " of ",
                                 to_string(place.tensor_sizes), ", ", place.payload_offset,
                                 " bytes into ", path_, ", does not lie within it"));
  }
  if (*checked_numel(tensor.sizes) == 0) return ok_status();
  return fail(write_runs(place, tensor));
}

Status SharedFileJob::write_runs(const BoxPlace& place, const LiveTensor& tensor) {
  const int64_t size = itemsize(tensor.dtype);
  const int64_t nbytes = *checked_numel(tensor.sizes) * size;
  const bool contiguous = is_contiguous(tensor);
  Runs runs(place, tensor.sizes, size);
  // Between short runs nothing follows on: gathering them in a window would only copy them.
  const bool one_by_one = !runs.is_one() && runs.nbytes() < least_direct(pool_);
  std::vector<std::byte> packed(contiguous ? 0 : static_cast<size_t>(std::min(nbytes, kPackChunk)));
  int64_t in_run = 0;  // Bytes of the current run that are written.
  for (int64_t done = 0; done < nbytes;) {
    Bytes chunk(tensor.data + done, static_cast<size_t>(contiguous ? nbytes - done : 0));
    if (!contiguous) {
      const MutableBytes out(packed.data(),
                             static_cast<size_t>(std::min(nbytes - done, kPackChunk)));
      pack_elements(tensor, done / size, (done + ssize(out)) / size, out);
      chunk = out;
    }
    done += ssize(chunk);
    while (!chunk.empty()) {
      const int64_t part = std::min(ssize(chunk), runs.nbytes() - in_run);
      const Bytes bytes = slice(chunk, 0, part);
      const int64_t offset = runs.offset() + in_run;
      RETURN_IF_ERROR(one_by_one ? file_->write(offset, bytes) : put_in_window(offset, bytes));
      chunk = chunk.subspan(static_cast<size_t>(part));
      in_run += part;
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
    return fail(invalid_argument(bytes.size(), " bytes at ", offset, " do not lie within ", path_));
  }
  return fail(put_in_window(offset, bytes));
}

Status SharedFileJob::put_in_window(int64_t offset, Bytes bytes) {
  if (offset != cursor_) RETURN_IF_ERROR(write_window());
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
    const int64_t part = std::min(ssize(bytes), room);
    std::memcpy(pool_.block(block_).data() + (cursor_ - window_), bytes.data(),
                static_cast<size_t>(part));
    cursor_ += part;
    offset += part;
    bytes = bytes.subspan(static_cast<size_t>(part));
  }
  return ok_status();
}

// Has what was gathered be written. Between two calls that follow on from each other, the end of
// the first is the end of a block, and so of a page.
Status SharedFileJob::write_window() {
  if (block_ == kNoBlock) return ok_status();
  const MutableBytes block = pool_.block(block_);
  const auto bytes_of = [&](int64_t begin, int64_t end) {
    return slice(block, begin - window_, end - begin);
  };
  const int64_t page = file_->alignment();
  const int64_t first = align_up(begin_, page);
  const int64_t last = align_down(cursor_, page);
  if (page > 1 && last - first >= least_direct(pool_)) {
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
  RETURN_IF_ERROR(fail(wait_for_all()));
  RETURN_IF_ERROR(fail(sync()));
  finished_ = true;
  let_go();
  return ok_status();
}

}  // namespace torch_ckpt
