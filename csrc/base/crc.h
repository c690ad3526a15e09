#pragma once

// CRC-32, the checksum of zip (reflected polynomial 0xEDB88320, as zlib's crc32). Computed by
// libdeflate with carry-less multiplication: at the speed of memory.

#include <cstdint>

#include "base/bytes.h"

namespace torch_ckpt {

// The CRC of the bytes already summed in `crc` (0 for none) followed by `bytes`.
uint32_t crc32(uint32_t crc, Bytes bytes);

// The CRC of A followed by B, from the CRC of each and the length of B. Cost: O(log nbytes_b).
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, int64_t nbytes_b);

}  // namespace torch_ckpt
