#pragma once

// A queue that runs plain system calls on a few threads, for kernels without usable io_uring. Made
// by `PosixFileSystem::make_queue`.

#include <memory>
#include <string>

#include "io/file_system.h"

namespace torch_ckpt {

// `reason` is the reason not to use io_uring, for `QueueMode`. A depth below 1 counts as 1. The
// threads block all signals, so that the threads of the host program handle them.
std::unique_ptr<IoQueue> make_thread_queue(int depth, std::string reason);

}  // namespace torch_ckpt
