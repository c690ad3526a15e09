#pragma once

// Many tensors into host memory at once, as fast as memory goes: training stands still meanwhile.

#include <cstddef>
#include <span>

#include "base/status.h"
#include "engine/live_tensor.h"

namespace torch_ckpt {

// A tensor, and where its elements go, one behind the other.
struct PackedCopy {
  LiveTensor tensor;
  std::byte* to = nullptr;
};

// Copies all of them, by this thread and others, `threads` in all where there can be as many.
// Requires: each has room where it goes.
Status copy_tensors(std::span<const PackedCopy> copies, int threads);

}  // namespace torch_ckpt
