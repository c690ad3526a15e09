#pragma once

// What the page cache holds of a file. A loader asks this to choose between a buffered read, which
// copies from memory, and a direct one, which goes to the disk. Called by `PosixFile`.

#include <cstdint>

namespace torch_ckpt {

// Whether every page of [offset, offset + nbytes) is cached. Exact where the kernel has `cachestat`
// (6.5 and newer); elsewhere, or where it is forbidden, what `probe_page_cache` says.
bool page_cache_holds(int fd, int64_t offset, int64_t nbytes);

// A guess from the first and the last byte alone, by reads that refuse to wait for the disk. Some
// kernels begin to read ahead when such a probe misses, so ask once. False where the file system
// has no such reads.
bool probe_page_cache(int fd, int64_t offset, int64_t nbytes);

}  // namespace torch_ckpt
