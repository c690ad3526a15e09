#pragma once

// A queue that carries out each request in one of its threads: plain system calls, for kernels
// without usable io_uring, or the requests of a store. Made by `make_queue` of a file system.

#include <functional>
#include <memory>
#include <string>

#include "io/file_system.h"

namespace torch_ckpt {

// Returns when a request is complete. The queue carries out `in_flight` requests at a time.
using CarryOut = std::function<Status(const IoRequest&, int in_flight)>;

// Makes a queue with at most so many threads, which begin requests in the order of their
// submission. A depth below 1 counts as 1. The threads block all signals, so that the threads of
// the host program handle them.
std::unique_ptr<IoQueue> make_thread_queue(int depth, int max_threads, QueueMode mode,
                                           CarryOut carry_out);

// Makes a queue of system calls on files of the operating system. `reason` is the reason not to use
// io_uring.
std::unique_ptr<IoQueue> make_thread_queue(int depth, std::string reason);

}  // namespace torch_ckpt
