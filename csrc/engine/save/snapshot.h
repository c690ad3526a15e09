#pragma once

// Snapshot: host memory with a consistent copy of the tensors that one rank saves.
//
// Training stops only while the snapshot is filled. The snapshot is then written to disk while
// training continues. Its memory is reused for every save. The memory is private to this process,
// or shared with other processes (Slot). The binding layer exposes it to torch as storages. Python
// code chooses the offset of each tensor.

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

// A tensor and the snapshot offset to which its elements are packed without gaps.
struct PackedCopy {
  LiveTensor tensor;
  int64_t offset = 0;
};

// Returns the offset for a payload of `nbytes` after the offset `end`. Large payloads are
// page-aligned, so that direct I/O can write from them.
int64_t place_in_snapshot(int64_t end, int64_t nbytes);

// Used by one thread at a time.
class Snapshot {
 public:
  // Allocates `nbytes` and populates all pages, so that filling causes no page faults. `threads`
  // threads share the work. Errors: kInvalidArgument; kStorage (ENOMEM) if memory is short.
  static Result<std::unique_ptr<Snapshot>> make(MemorySource& source, int64_t nbytes, int threads);

  MutableBytes bytes() const { return memory_.bytes(); }

  // Pins the memory on the first call, unless the device is the host. If pinning fails, copies
  // still work, but more slowly.
  void pin_for(const Device& device);

  // Copies all tensors with up to `threads` threads, including this one. Copies the tensors of each
  // device together, before those of the host. Gaps between a device's tensors may become zero.
  // Errors: those of the devices; kInvalidArgument if a tensor does not fit, and then no tensor is
  // copied.
  Status copy(std::span<const PackedCopy> copies, int threads);

 protected:
  // Offsets of copies count from the start of `payload`. All copies lie within it.
  Snapshot(Memory memory, MutableBytes payload) : payload_(payload), memory_(std::move(memory)) {}

  MutableBytes payload_;

 private:
  Status pack(std::vector<const PackedCopy*> copies);

  Memory memory_;
  std::shared_ptr<void> pinned_;  // Destroyed before the memory.
};

}  // namespace torch_ckpt
