#pragma once

// The state machine of one request: the next system call, and the interpretation of its result. All
// queues share this code for short transfers, the end of the file and error messages.
//
// A queue makes a `Transfer` from each request, then repeats `next` and `advance` until there is a
// status.

#include <cstdint>
#include <optional>

#include "io/file_system.h"
#include "io/posix_file.h"

namespace torch_ckpt {

// Used by one thread at a time.
class Transfer {
 public:
  // One system call: read or write `nbytes` at `offset`, or fsync for kSync.
  struct Step {
    IoRequest::Kind kind;
    int fd;
    std::byte* data;
    uint32_t nbytes;  // At most 1 GiB, far below the limit of one call.
    int64_t offset;
  };

  Transfer() = default;
  explicit Transfer(const IoRequest& request);

  uint64_t tag() const { return request_.tag; }

  // Returns the status of a request that needs no system call: an invalid or an empty one.
  std::optional<Status> finished_at_once() const;

  // Returns the next system call. Requires: not finished.
  Step next() const;

  // Processes the result of the call: a byte count, or a negative errno. Returns the status of a
  // finished request, or nullopt if another call is needed.
  std::optional<Status> advance(int64_t result);

  // "cannot read 4096 bytes at 8192 of step-1/__0_0.distcp"
  std::string failure() const;

 private:
  bool through_direct() const;
  std::optional<Status> retry_or_fail(int error);
  Status end_of_file() const;

  IoRequest request_ = {};
  const PosixFile* file_ = nullptr;
  int64_t done_ = 0;  // Bytes transferred.
  int retries_ = 0;   // Retries since the last progress.
};

// Executes one step as a blocking system call. Returns the argument for `advance`.
int64_t perform(const Transfer::Step& step);

}  // namespace torch_ckpt
