#pragma once

// Page cache residency of file ranges. A loader uses it to choose between a buffered read, which
// copies from memory, and a direct read from the disk. Called by `PosixFile`.

#include <cstdint>

namespace torch_ckpt {

// Returns whether every page of [offset, offset + nbytes) is cached. Exact if the kernel has
// `cachestat` (6.5 and newer) and permits it; otherwise falls back to `probe_page_cache`.
bool page_cache_has(int fd, int64_t offset, int64_t nbytes);

// Estimates residency from the first and the last byte, by non-blocking reads. Some kernels start
// readahead when a probe misses, so probe a range only once. Returns false if the file system does
// not support non-blocking reads.
bool probe_page_cache(int fd, int64_t offset, int64_t nbytes);

}  // namespace torch_ckpt
