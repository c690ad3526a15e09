#pragma once

// Named shared memory between processes of one user: a mapped file on tmpfs.
//
// The memory outlives its creator. All pages are reserved at creation. If tmpfs is full, creation
// fails with an error; a later write never raises SIGBUS.

#include <cstdint>
#include <string>

#include "base/memory.h"
#include "base/status.h"

namespace torch_ckpt {

// Returns whether the files in a directory are in memory alone. Those of any other file system may
// survive a power cut: a file with its length, and zeros in the place of its bytes.
// Errors: kStorage.
Result<bool> is_in_memory(const std::string& directory);

// Creates the file `path`, accessible only to its owner, and maps at least `nbytes` zero bytes,
// rounded up to whole pages.
// Requires: nbytes > 0.
// Errors: kStorage, with ENOSPC if there is not enough memory; the file is then removed.
Result<Memory> create_shared_memory(const std::string& path, int64_t nbytes);

// Maps memory that `create_shared_memory` created. `at_hand` populates all pages, so that a writer
// has no page faults; this costs about a second per 100 GiB.
// Errors: kNotFound; kCorruption if the file is not fully reserved or is not a shared memory file.
Result<Memory> map_shared_memory(const std::string& path, bool writable, bool at_hand = false);

}  // namespace torch_ckpt
