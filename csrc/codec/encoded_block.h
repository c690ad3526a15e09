#pragma once

// Encoded blocks: the streams of a RawBlock, each compressed where that makes it shorter.
// csrc/format/FORMAT.md states the bytes.

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "codec/raw_block.h"

namespace torch_ckpt {

// Appends the encoded block to `out`. Appends nothing for an unchanged block.
// Errors: kUnsupported without libzstd; kInternal if memory is short.
Status encode_block(const RawBlock& block, const std::byte* streams, std::vector<std::byte>& out);

// Decodes to the XOR of both versions of the block. Accepts any bytes.
// Requires: `xors` has the length of the block, at most kBlockNbytes and a multiple of `unit`.
// Errors: kCorruption, which leaves `xors` undefined; kUnsupported.
Status decode_block(Bytes encoded, int64_t unit, MutableBytes xors);

}  // namespace torch_ckpt
