#pragma once

// Zstandard frames, by libzstd. Each thread reuses its contexts. A build without libzstd returns
// kUnsupported from every function that needs it.

#include <cstdint>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Returns OK, or why this build cannot compress and decompress.
Status zstd_available();

// Returns the most bytes that `nbytes` bytes are compressed to.
int64_t zstd_bound(int64_t nbytes);

// Compresses to one frame, and returns its length. Requires: `to` has zstd_bound(from.size()).
Result<int64_t> zstd_compress(Bytes from, std::byte* to);

// Decompresses a frame of exactly `to.size()` bytes. Errors: kCorruption.
Status zstd_decompress(Bytes from, MutableBytes to);

}  // namespace torch_ckpt
