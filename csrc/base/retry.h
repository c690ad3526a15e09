#pragma once

// Retries of interrupted system calls. Not for fsync (see transfer.cc) and not for close.

#include <cerrno>

namespace torch_ckpt {

// Attempts at a system call. Enough for a storm of signals; finite, so that a sandbox or file
// system that refuses the call with EINTR or EAGAIN each time cannot cause a hang.
inline constexpr int kMaxAttempts = 10000;

// Repeats `call` while it fails with EINTR: a signal to the host program must not fail a save.
template <typename Call>
auto retry_interrupted(Call call) {
  for (int attempts = 1;; ++attempts) {
    const auto result = call();
    if (result >= 0 || errno != EINTR || attempts == kMaxAttempts) return result;
  }
}

}  // namespace torch_ckpt
