#pragma once

// Temporaries: memory for tensors that the engine cannot load into, because of their device or
// dtype. A temporary is allocated for the first byte of a tensor and passed on after the last, so
// that few exist at a time.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"

namespace torch_ckpt {

// Loaded bytes with their own memory.
struct LoadedBytes {
  std::unique_ptr<std::byte[]> data;
  int64_t nbytes = 0;
};

// Receives the row-major elements of a request without memory. Called from any thread, by one
// thread at a time.
using HandOver = std::function<Status(int64_t request, LoadedBytes bytes)>;

// Safe to use from any thread, except for `expect`.
class Temporaries {
 public:
  explicit Temporaries(const HandOver& hand_over) : hand_over_(hand_over) {}

  // Announces one more piece of a request. Requires: no piece of any request has arrived.
  void expect(int64_t request, int64_t nbytes);

  // Returns the memory for the whole request. Errors: kStorage if allocation fails.
  Result<std::byte*> memory(int64_t request);

  // Records that one piece is in memory. After the last piece, calls `hand_over`.
  Status arrived(int64_t request);

 private:
  struct Expected {
    int64_t nbytes = 0;
    int64_t pieces = 0;
    std::unique_ptr<std::byte[]> data = nullptr;
  };

  const HandOver& hand_over_;
  std::mutex mutex_;
  std::mutex handing_over_;
  std::map<int64_t, Expected> expected_;
};

}  // namespace torch_ckpt
