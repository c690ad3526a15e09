#pragma once

// Where tensors live, and how their bytes move between there and the engine's buffers.
//
// `engine/` works out copies as plain values and has a device carry them out. The CPU device is the
// reference: any other must leave the same bytes.

#include <cstdint>

#include "base/bytes.h"
#include "base/status.h"
#include "base/strided.h"

namespace torch_ckpt {

// Safe to call from any thread.
class Device {
 public:
  virtual ~Device() = default;

  // Carries out `copy`. Source and destination do not overlap.
  // Requires: every element of the copy lies in memory that the caller keeps alive.
  // An error leaves any bytes at the destination; ordinary memory has none.
  virtual Status copy(const StridedCopy& copy, const std::byte* src, std::byte* dst) const = 0;

  // Copies `src` to `dst` and returns the CRC-32 of `crc`'s bytes followed by these, in one pass
  // over memory. Requires: dst.size() == src.size(), no overlap.
  virtual Result<uint32_t> copy_and_checksum(Bytes src, MutableBytes dst, uint32_t crc) const = 0;
};

// Tensors in ordinary memory. Lives as long as the process.
const Device& cpu_device();

}  // namespace torch_ckpt
