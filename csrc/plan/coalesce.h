#pragma once

// Coalescing: merges many wanted byte ranges of one file into few reads.

#include <cstdint>
#include <span>
#include <vector>

#include "geometry/overlap.h"

namespace torch_ckpt {

// One read. It serves the wanted ranges order[first, last) of `Reads`.
struct Read {
  ByteRange range;
  int64_t first = 0;
  int64_t last = 0;
  int64_t wanted_nbytes = 0;  // Wanted bytes in `range`.
};

struct Reads {
  std::vector<int64_t> order;  // Indices of the wanted ranges, in ascending order of start.
  std::vector<Read> reads;     // In ascending order of start.
};

// Groups wanted ranges into reads. A range joins the previous read if three conditions are true.
// The gap between them has at most `max_gap` bytes. The gap is no longer than the read's wanted
// bytes (or kSmallGap). The read stays within `max_nbytes`. A longer range is a separate read.
// Every range lies in exactly one read.
Reads coalesce(std::span<const ByteRange> wanted, int64_t max_nbytes, int64_t max_gap);

}  // namespace torch_ckpt
