#pragma once

// The layout of one data file: the position of every byte, computed from sizes alone before
// anything is written. Staging and writing both use this layout of the file's image.

#include <cstdint>
#include <span>
#include <vector>

namespace torch_ckpt {

// A payload of at least kLargePayload bytes starts at a multiple of kLargeAlignment in the file.
// Direct I/O can then read it straight into aligned memory. The cost is a gap before the slice. All
// other slices start at a multiple of kSmallAlignment.
inline constexpr int64_t kSmallAlignment = 64;
inline constexpr int64_t kLargeAlignment = 4096;
inline constexpr int64_t kLargePayload = int64_t{1} << 20;

// The lengths of one item's slice, in bytes.
struct SliceNbytes {
  int64_t head = 0;  // Multiple of kSmallAlignment.
  int64_t payload = 0;
  int64_t tail = 0;
};

// The slice of one item in the file. Gaps between slices are zero and belong to no slice.
struct Slice {
  int64_t offset = 0;
  SliceNbytes nbytes;

  int64_t payload_offset() const { return offset + nbytes.head; }
  int64_t tail_offset() const { return payload_offset() + nbytes.payload; }
  int64_t end() const { return tail_offset() + nbytes.tail; }
  int64_t total_nbytes() const { return nbytes.head + nbytes.payload + nbytes.tail; }
};

// Slices in item order, ascending and without overlap. `nbytes` is the end of the last slice.
struct Layout {
  std::vector<Slice> slices;
  int64_t nbytes = 0;
};

// Places slices one after another.
// Requires: no length is negative, heads are multiples of kSmallAlignment, and the sum of all
// lengths plus kLargeAlignment per slice fits an int64_t.
Layout lay_out(std::span<const SliceNbytes> items);

// Returns the offset of a slice that is appended after `end`.
int64_t next_slice_offset(int64_t end, const SliceNbytes& item);

}  // namespace torch_ckpt
