#include "io/transfer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "base/retry.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kMaxStep = int64_t{1} << 30;  // Multiple of every alignment.

}  // namespace

Transfer::Transfer(const IoRequest& request)
    : request_(request), file_(dynamic_cast<const PosixFile*>(request.file)) {}

std::optional<Status> Transfer::finished_at_once() const {
  if (file_ == nullptr) {
    return internal_error("a request names no file of the file system that made its queue");
  }
  if (request_.kind == IoRequest::Kind::kSync) return std::nullopt;
  const int64_t nbytes = ssize(request_.memory);
  if (!range_within(request_.offset, nbytes, std::numeric_limits<int64_t>::max())) {
    return invalid_argument(failure(), ": no file has such a range");
  }
  const int64_t alignment = file_->alignment();
  const auto address = reinterpret_cast<uintptr_t>(request_.memory.data());
  if (through_direct() && (request_.offset % alignment != 0 || nbytes % alignment != 0 ||
                           address % static_cast<uintptr_t>(alignment) != 0)) {
    return invalid_argument(
        failure(), ": direct I/O needs offset, length and memory at multiples of ", alignment);
  }
  if (nbytes == 0) return ok_status();
  return std::nullopt;
}

// The direct descriptor accepts only aligned steps. After a short transfer that ends unaligned, the
// rest uses the page cache.
bool Transfer::through_direct() const {
  return request_.caching == Caching::kDirect && file_->alignment() > 1 &&
         done_ % file_->alignment() == 0;
}

Transfer::Step Transfer::next() const {
  Step step = {};
  step.kind = request_.kind;
  step.fd = file_->buffered_fd();
  if (request_.kind == IoRequest::Kind::kSync) return step;
  if (through_direct()) step.fd = file_->direct_fd();
  step.data = request_.memory.data() + done_;
  step.nbytes = static_cast<uint32_t>(std::min(ssize(request_.memory) - done_, kMaxStep));
  step.offset = request_.offset + done_;
  return step;
}

std::optional<Status> Transfer::advance(int64_t result) {
  if (request_.kind == IoRequest::Kind::kSync) {
    // Never retried, not even after EINTR: the kernel reports a lost write once, so a second fsync
    // may succeed although the bytes are lost.
    if (result < 0) return errno_status(static_cast<int>(-result), failure());
    return ok_status();
  }
  if (result < 0) return retry_or_fail(static_cast<int>(-result));

  const bool reading = request_.kind == IoRequest::Kind::kRead;
  if (result == 0) return reading ? end_of_file() : errno_status(EIO, failure());

  const bool was_direct = through_direct();
  retries_ = 0;
  done_ += result;
  if (done_ >= ssize(request_.memory)) return ok_status();
  // A short direct read usually means the end of the file. If the size cannot be read, the next
  // step finds the end.
  if (reading && was_direct) {
    const Result<int64_t> size = file_->size();
    if (size.ok() && *size <= request_.offset + done_) return end_of_file();
  }
  return std::nullopt;
}

std::optional<Status> Transfer::retry_or_fail(int error) {
  if ((error == EINTR || error == EAGAIN) && ++retries_ < kMaxAttempts) return std::nullopt;
  return errno_status(error, failure());
}

// Returns the status of a read that reached the end of the file. OK only for a direct read whose
// length was rounded up to the alignment.
Status Transfer::end_of_file() const {
  const Result<int64_t> size = file_->size();
  if (!size.ok()) return size.status();
  const int64_t end = std::min(*size, request_.offset + done_);
  const int64_t asked = request_.offset + ssize(request_.memory);
  const int64_t slack = request_.caching == Caching::kDirect ? file_->alignment() : 1;
  if (end > asked - slack) return ok_status();
  return corruption(failure(), ": the file ends at ", end);
}

std::string Transfer::failure() const {
  const std::string path = file_ ? file_->path() : "an unknown file";
  if (request_.kind == IoRequest::Kind::kSync) return str_cat("cannot sync ", path);
  return str_cat(request_.kind == IoRequest::Kind::kRead ? "cannot read " : "cannot write ",
                 request_.memory.size(), " bytes at ", request_.offset, " of ", path);
}

int64_t perform(const Transfer::Step& step) {
  int64_t result = -1;
  switch (step.kind) {
    case IoRequest::Kind::kRead:
      result = ::pread(step.fd, step.data, step.nbytes, step.offset);
      break;
    case IoRequest::Kind::kWrite:
      result = ::pwrite(step.fd, step.data, step.nbytes, step.offset);
      break;
    case IoRequest::Kind::kSync:
      result = ::fsync(step.fd);
      break;
  }
  return result < 0 ? -errno : result;
}

}  // namespace torch_ckpt
