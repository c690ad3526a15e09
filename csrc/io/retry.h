#pragma once

// Retries of interrupted system calls. Not for fsync (see transfer.cc) and not for close.

#include <cerrno>

namespace torch_ckpt {

// Repeats `call` while it fails with EINTR: a signal to the host program must not fail a save.
template <typename Call>
auto retry_interrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

}  // namespace torch_ckpt
