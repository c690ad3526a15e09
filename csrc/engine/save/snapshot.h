#pragma once

// Snapshot: host memory that holds a consistent copy of what one rank saves.
//
// Training stops while it is filled, and for nothing else: it is written to disk from where it is,
// while training goes on. So its memory is kept and filled anew for each save, as fast as memory
// goes. It is of this process, or shared with others (Slot). The binding layer gives it to torch as
// storages; Python decides what goes where.

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

// A tensor, and where in a snapshot its elements go, one behind the other.
struct PackedCopy {
  LiveTensor tensor;
  int64_t offset = 0;
};

// Where `nbytes` go behind what ends at `end`: what is long at a page, from where a disk takes it.
int64_t place_in_snapshot(int64_t end, int64_t nbytes);

// Used by one thread at a time.
class Snapshot {
 public:
  // With memory for `nbytes`, all of it there: filling it meets no page fault. `threads` share the
  // work. Errors: kInvalidArgument; kStorage (ENOMEM) where the system has not so much memory.
  static Result<std::unique_ptr<Snapshot>> make(MemorySource& source, int64_t nbytes, int threads);

  MutableBytes bytes() const { return memory_.bytes(); }

  // Pins the memory, once, unless the device is the host. Where that cannot be, all works as well,
  // more slowly.
  void pin_for(const Device& device);

  // Copies all of them, by this thread and others, `threads` in all where there can be as many;
  // those of a device together, before any of the host. What lies between those of a device may
  // become zero. kInvalidArgument where one does not fit; then nothing has been copied.
  Status copy(std::span<const PackedCopy> copies, int threads);

 protected:
  // Offsets of copies count from `payload_begin`, and they reach no further than this payload.
  Snapshot(Memory memory, MutableBytes payload) : payload_(payload), memory_(std::move(memory)) {}

  MutableBytes payload_;

 private:
  Status pack(std::vector<const PackedCopy*> copies);

  Memory memory_;
  std::shared_ptr<void> pinned_;  // Gone before the memory.
};

}  // namespace torch_ckpt
