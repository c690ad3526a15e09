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

// Maps all of what `create_shared_memory` has made. `at_hand`: with all its pages, for whoever is
// to fill it, so that this meets no page fault; that takes a second for 100 GiB or so. Errors:
// kNotFound; kCorruption for what has not all its memory, or is no such file.
Result<Memory> map_shared_memory(const std::string& path, bool writable, bool at_hand = false);

}  // namespace torch_ckpt
