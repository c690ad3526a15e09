#pragma once

// Many tensors into host memory at once, as fast as memory goes: training stands still meanwhile.

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/memory.h"
#include "base/status.h"
#include "engine/live_tensor.h"

namespace torch_ckpt {

// A tensor, and where in some memory its elements go, one behind the other.
struct PackedCopy {
  LiveTensor tensor;
  int64_t offset = 0;
};

// Memory that tensors are copied to, again and again. Used by one thread at a time.
class CopyTarget {
 public:
  explicit CopyTarget(Memory memory) : memory_(std::move(memory)) {}

  MutableBytes bytes() const { return memory_.bytes(); }

  // Pins the memory, once, unless the device is the host. Where that cannot be, all works as well,
  // more slowly.
  void pin_for(const Device& device);
  bool is_pinned() const { return pinned_ != nullptr; }

  // Copies all of them to `memory`, which is part of its own, by this thread and others, `threads`
  // in all where there can be as many; those of a device together, before any of the host.
  // kInvalidArgument where one does not fit; then nothing has been copied.
  Status copy(std::span<const PackedCopy> copies, MutableBytes memory, int threads);

 private:
  Status pack(std::vector<const PackedCopy*> copies, MutableBytes memory);

  Memory memory_;
  std::shared_ptr<void> pinned_;  // Gone before the memory.
};

}  // namespace torch_ckpt
