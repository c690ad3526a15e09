#pragma once

// The difference of two versions of a block, as streams that are not compressed yet. Training stops
// while differences are taken, so this is fast; codec/encoded_block.h compresses them later.

#include <cstdint>
#include <memory>

#include "base/bytes.h"
#include "codec/block.h"

namespace torch_ckpt {

enum class BlockKind : uint8_t {
  kUnchanged = 0,
  kGaps = 1,    // The gaps between changed units, then the planes of their XORs.
  kPlanes = 2,  // The planes of the XORs of all units.
};

// Describes streams that lie one after another: the gaps (kGaps), then `unit` planes. Plane p has
// byte p of the XOR of each of `count` units. A gap is the number of unchanged units before a
// changed one: bytes of 255 add up, and a byte below 255 ends the gap.
//
// A small change of a bfloat16 changes its low byte only. So plane 1 of units of two bytes has the
// bytes of `wide` units only if these are few: the others are 0. The number of each such unit among
// the `count` ones, an uint16_t, comes before this plane.
struct RawBlock {
  BlockKind kind = BlockKind::kUnchanged;
  int32_t unit = 1;         // Bytes per unit, which is the number of planes.
  int32_t count = 0;        // Units with a XOR in the planes.
  int32_t gaps_nbytes = 0;  // 0 for kPlanes.
  int32_t wide = 0;         // Units with a byte in the planes above 0: `count` if not few.
  int32_t changed = 0;      // Units that have changed.
  uint64_t digest = 0;      // XXH3-64 of the new bytes; 0 for kUnchanged.

  int64_t nbytes() const {
    const int64_t numbers_nbytes = wide < count ? int64_t{2} * wide : 0;
    return gaps_nbytes + count + numbers_nbytes + int64_t{wide} * (unit - 1);
  }
};

// Room for the streams of a block, and for a vector behind them.
inline constexpr int64_t kMaxRawNbytes = kBlockNbytes + 1024;

// Compares blocks, in memory of its own. Used by one thread at a time.
class BlockComparison {
 public:
  BlockComparison();
  ~BlockComparison();

  // Compares a block of the snapshot with the block's new bytes, writes its `streams`, and copies
  // the new bytes to the snapshot.
  // Requires: equal sizes of at most kBlockNbytes bytes, a multiple of `unit`; `unit` is 1, 2, 4 or
  // 8; no overlap.
  RawBlock take(MutableBytes snapshot, Bytes source, int64_t unit);

  // The streams of the block that was taken last.
  const std::byte* streams() const;

 private:
  struct Scratch;
  const std::unique_ptr<Scratch> scratch_;
};

}  // namespace torch_ckpt
