#pragma once

// Memory that processes of one user share under a name: a file of tmpfs, mapped.
//
// It outlives whoever has made it. All of it is there from the beginning: where tmpfs is full, that
// is an error here, and never a SIGBUS of whoever writes to it.

#include <cstdint>
#include <string>

#include "base/memory.h"
#include "base/status.h"

namespace torch_ckpt {

// Makes the file `path`, which nobody else may open, and maps at least `nbytes` of zeros, a
// multiple of the page size. Requires: nbytes > 0.
// Errors: kStorage, with ENOSPC where there is not as much memory; then nothing is left of it.
Result<Memory> create_shared_memory(const std::string& path, int64_t nbytes);

// Maps all of what `create_shared_memory` has made, with all its pages at hand if it is to be
// written. Errors: kNotFound; kCorruption for what has not all its memory, or is no such file.
Result<Memory> map_shared_memory(const std::string& path, bool writable);

}  // namespace torch_ckpt
