#pragma once

// A queue over io_uring: one system call hands over many requests, and none waits for another. Made
// by `PosixFileSystem::make_queue`. Absent from a build without liburing (TORCH_CKPT_HAVE_URING).

#include <memory>

#include "io/file_system.h"

namespace torch_ckpt {

// kUnsupported, with the reason, where the kernel or a sandbox refuses io_uring. A depth below 1
// counts as 1, one beyond the kernel's limit as that limit.
//
// Registers `registered` with the kernel, which then need not look up its pages at every request.
// Where that fails (RLIMIT_MEMLOCK) the queue works without, and its mode says why. The pages stay
// locked until the queue is destroyed.
//
// The queue may be handed to another thread while nothing is in flight.
Result<std::unique_ptr<IoQueue>> make_uring_queue(int depth, MutableBytes registered);

}  // namespace torch_ckpt
