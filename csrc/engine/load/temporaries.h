#pragma once

// Memory for tensors that the engine cannot load into: on another device, of another dtype. Made
// when the first byte of one comes and handed over with its last, so that few exist at a time.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"

namespace torch_ckpt {

// Bytes in memory of their own.
struct LoadedBytes {
  std::unique_ptr<std::byte[]> data;
  int64_t nbytes = 0;
};

// Takes the elements, row-major, of a request that came without memory. Called by any thread, by
// one at a time.
using HandOver = std::function<Status(int64_t request, LoadedBytes bytes)>;

// Safe to use from any thread, but for `expect`.
class Temporaries {
 public:
  explicit Temporaries(const HandOver& hand_over) : hand_over_(hand_over) {}

  // Says that one more part of a request will arrive; before any does.
  void expect(int64_t request, int64_t nbytes);

  // Memory for all of a request. Errors: kStorage where there is none.
  Result<std::byte*> memory(int64_t request);

  // One part is in its memory. Hands the request over with the last.
  Status arrived(int64_t request);

 private:
  struct Expected {
    int64_t nbytes = 0;
    int64_t parts = 0;
    std::unique_ptr<std::byte[]> data = nullptr;
  };

  const HandOver& hand_over_;
  std::mutex mutex_;
  std::mutex handing_over_;
  std::map<int64_t, Expected> expected_;
};

}  // namespace torch_ckpt
