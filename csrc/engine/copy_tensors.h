#pragma once

// Many tensors into host memory at once, as fast as memory goes: training stands still meanwhile.

#include <cstdint>
#include <span>

#include "base/bytes.h"
#include "base/status.h"
#include "engine/live_tensor.h"

namespace torch_ckpt {

// A tensor, and where in some memory its elements go, one behind the other.
struct PackedCopy {
  LiveTensor tensor;
  int64_t offset = 0;
};

// Copies all of them to `memory`, by this thread and others, `threads` in all where there can be as
// many. kInvalidArgument where one does not fit; then nothing has been copied.
Status copy_tensors(std::span<const PackedCopy> copies, MutableBytes memory, int threads);

}  // namespace torch_ckpt
