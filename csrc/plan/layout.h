#pragma once

// Layout: where every byte of one data file will lie, decided before any of it is written and from
// sizes alone. The result is the image of the file: staging fills it, writing copies it out.

#include <cstdint>
#include <span>
#include <vector>

namespace torch_ckpt {

// Payloads of at least kLargePayload bytes begin at a multiple of kLargeAlignment of the file, so
// that they can be read directly into aligned memory; it costs a gap before the slice. All other
// slices begin at a multiple of kSmallAlignment.
inline constexpr int64_t kSmallAlignment = 64;
inline constexpr int64_t kLargeAlignment = 4096;
inline constexpr int64_t kLargePayload = int64_t{1} << 20;

// The lengths of one item's slice, in bytes.
struct SliceNbytes {
  int64_t head = 0;  // A multiple of kSmallAlignment.
  int64_t payload = 0;
  int64_t tail = 0;
};

// One item's slice in the file. Gaps between slices are zero and belong to no slice.
struct Slice {
  int64_t offset = 0;
  SliceNbytes nbytes;

  int64_t payload_offset() const { return offset + nbytes.head; }
  int64_t tail_offset() const { return payload_offset() + nbytes.payload; }
  int64_t end() const { return tail_offset() + nbytes.tail; }
  int64_t total_nbytes() const { return nbytes.head + nbytes.payload + nbytes.tail; }
};

// Slices in the order of the items, ascending and without overlap; `nbytes` is where the last ends.
struct Layout {
  std::vector<Slice> slices;
  int64_t nbytes = 0;
};

// Places slices one after another.
// Requires: every length is at least 0, heads are multiples of kSmallAlignment, and their sum with
// kLargeAlignment bytes each fits an int64_t.
Layout lay_out(std::span<const SliceNbytes> items);

// Where a slice goes that is added behind `end`.
int64_t next_slice_offset(int64_t end, const SliceNbytes& item);

}  // namespace torch_ckpt
