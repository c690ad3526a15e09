#pragma once

// System calls that a signal may interrupt. Used throughout this room; never for fsync (see
// transfer.cc) nor close.

#include <cerrno>

namespace torch_ckpt {

// Calls until it ends otherwise than by EINTR: a signal of the host program is no failure of a
// save.
template <typename Call>
auto retry_interrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

}  // namespace torch_ckpt
