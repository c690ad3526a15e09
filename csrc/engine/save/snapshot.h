#pragma once

// Snapshot: host memory that holds a consistent copy of what one rank saves.
//
// Training stops while it is filled, and for nothing else: it is written to disk from where it is,
// while training goes on. So it is made once, with all its pages, and filled anew for each save.
// The binding layer gives its memory to torch as storages; staging.py decides what goes where.

#include <cstdint>
#include <memory>
#include <span>

#include "base/bytes.h"
#include "base/memory.h"
#include "base/status.h"
#include "engine/save/copy_target.h"

namespace torch_ckpt {

class Snapshot {
 public:
  // With memory for `nbytes`, all of it there: filling it meets no page fault. `threads` share the
  // work. Errors: kInvalidArgument; kStorage (ENOMEM) where the system has not so much memory.
  static Result<std::unique_ptr<Snapshot>> make(MemorySource& source, int64_t nbytes, int threads);

  MutableBytes memory() const { return target_.bytes(); }

  // As CopyTarget.
  void pin_for(const Device& device) { target_.pin_for(device); }

  // As CopyTarget::copy.
  Status fill(std::span<const PackedCopy> copies, int threads);

 private:
  explicit Snapshot(Memory memory) : target_(std::move(memory)) {}

  CopyTarget target_;
};

}  // namespace torch_ckpt
