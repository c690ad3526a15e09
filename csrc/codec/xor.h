#pragma once

// XOR of bytes in place.

#include <cstddef>
#include <cstdint>

namespace torch_ckpt {

// Computes to[i] ^= from[i]. Requires: no overlap.
void xor_bytes(const std::byte* from, std::byte* to, int64_t nbytes);

}  // namespace torch_ckpt
