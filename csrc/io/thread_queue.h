#pragma once

// A queue of plain system calls on a few threads, for kernels that forbid or lack io_uring. Made by
// `PosixFileSystem::make_queue`.

#include <memory>
#include <string>

#include "io/file_system.h"

namespace torch_ckpt {

// `reason`: why not io_uring, for `QueueMode`. A depth below 1 counts as 1. The threads take no
// signals: those stay with the host program.
std::unique_ptr<IoQueue> make_thread_queue(int depth, std::string reason);

}  // namespace torch_ckpt
