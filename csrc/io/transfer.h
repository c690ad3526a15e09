#pragma once

// One request on its way: what to ask of the kernel next, and what its answer means. Short
// transfers, the end of the file and the words of an error are decided here, once, for every queue.
//
// A queue makes a `Transfer` of each request, then repeats `next` and `advance` until there is a
// status to report.

#include <cstdint>
#include <optional>

#include "io/file_system.h"
#include "io/posix_file.h"

namespace torch_ckpt {

// Used by one thread at a time.
class Transfer {
 public:
  // One system call: read or write `nbytes` at `offset`, or (kSync) fsync.
  struct Step {
    IoRequest::Kind kind;
    int fd;
    std::byte* data;
    uint32_t nbytes;  // At most 1 GiB, far below what one call may carry.
    int64_t offset;
  };

  Transfer() = default;
  explicit Transfer(const IoRequest& request);

  uint64_t tag() const { return request_.tag; }

  // The status of a request that needs no system call: it is not valid, or moves no bytes.
  std::optional<Status> finished_at_once() const;

  // Requires: not finished.
  Step next() const;

  // Takes what the call returned: a byte count, or a negative errno. Returns the status when the
  // request is finished, and nothing when `next` has more to ask.
  std::optional<Status> advance(int64_t result);

  // "cannot read 4096 bytes at 8192 of step-1/__0_0.distcp"
  std::string failure() const;

 private:
  bool through_direct() const;
  std::optional<Status> retry_or_fail(int error);
  Status end_of_file() const;

  IoRequest request_ = {};
  const PosixFile* file_ = nullptr;
  int64_t done_ = 0;  // Bytes.
  int retries_ = 0;   // Since the last progress.
};

// Carries out one step with a plain, waiting system call; returns what `advance` takes.
int64_t perform(const Transfer::Step& step);

}  // namespace torch_ckpt
