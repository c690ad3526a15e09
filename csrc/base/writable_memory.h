#pragma once

// Whether memory of this process can be written. A write to a read-only mapping ends the process,
// so a load checks the memory of tensors that torch has not allocated. Called by the bindings.

namespace torch_ckpt {

// Returns whether the byte at `address` can be written. Its value does not change. Returns true if
// the answer is unknown, because the process has no file descriptor left.
// Requires: no other thread writes to the byte.
bool is_writable(const void* address);

}  // namespace torch_ckpt
