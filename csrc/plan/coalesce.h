#pragma once

// Coalescing: many wanted byte ranges of one file become few reads.

#include <cstdint>
#include <span>
#include <vector>

#include "geometry/overlap.h"

namespace torch_ckpt {

// One read, and which of the wanted ranges it serves: order[first, last) of `Reads`.
struct Read {
  ByteRange range;
  int64_t first = 0;
  int64_t last = 0;
  int64_t wanted_nbytes = 0;  // Of `range`.
};

struct Reads {
  std::vector<int64_t> order;  // Indices of the wanted ranges, ascending by where they begin.
  std::vector<Read> reads;     // Ascending by where they begin.
};

// Groups wanted ranges into reads: neighbours share one when it skips at most `max_gap` unwanted
// bytes between them, no more than it has wanted so far (or kSmallGap), and stays within
// `max_nbytes`. A longer range is a read of its own. Every range lies whole in the read that serves
// it.
Reads coalesce(std::span<const ByteRange> wanted, int64_t max_nbytes, int64_t max_gap);

}  // namespace torch_ckpt
