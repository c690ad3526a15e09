#pragma once

// CRC-32, the checksum of the zip format (reflected polynomial 0xEDB88320, same as zlib's crc32).
// libdeflate computes it with carry-less multiplication, at memory speed.

#include <cstdint>

#include "base/bytes.h"

namespace torch_ckpt {

// Extends `crc`, the CRC of the preceding bytes (0 if there are none), by `bytes`.
uint32_t crc32(uint32_t crc, Bytes bytes);

// Returns the CRC of A followed by B, given both CRCs and the length of B. Cost: O(log nbytes_b).
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, int64_t nbytes_b);

}  // namespace torch_ckpt
