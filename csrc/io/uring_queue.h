#pragma once

// An io_uring queue: one system call submits many requests. Made by `PosixFileSystem::make_queue`.
// Not in builds without liburing (TORCH_CKPT_HAVE_URING).

#include <memory>

#include "io/file_system.h"

namespace torch_ckpt {

// Makes a queue. A depth below 1 counts as 1, a depth above the kernel's limit as that limit.
//
// If the registration of memory fails (RLIMIT_MEMLOCK), the queue works without it, and its mode
// has the reason. The pages stay locked until the queue is destroyed.
//
// The queue may move to another thread while no request is in flight.
// Errors: kUnsupported, with the reason, if the kernel or a sandbox refuses io_uring.
Result<std::unique_ptr<IoQueue>> make_uring_queue(int depth);

}  // namespace torch_ckpt
