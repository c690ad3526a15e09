#pragma once

// Where tensors live, and how their bytes move between there and the engine's buffers.
//
// `engine/` works out copies as plain values and has a device carry them out. The CPU device is the
// reference: any other must leave the same bytes.

#include <cstdint>
#include <memory>
#include <span>

#include "base/bytes.h"
#include "base/memory.h"
#include "base/status.h"
#include "base/strided.h"

namespace torch_ckpt {

// One copy between a tensor and a buffer. Of `copy`, the tensor's side counts from `tensor`, the
// other one from the start of the buffer.
struct TensorCopy {
  std::byte* tensor = nullptr;
  StridedCopy copy;
};

// What was asked of a device, up to some point. Safe to use from any thread.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;

  // Until it is done. An error is that of any work before it.
  virtual Status wait() const = 0;
  virtual Result<bool> done() const = 0;
};

// Safe to call from any thread.
class Device {
 public:
  virtual ~Device() = default;

  // Whether its tensors are in ordinary memory, where files can be read to.
  virtual bool is_host() const = 0;

  // Where buffers come from that `unpack` copies from. Lives as long as the device; what it has
  // given may live longer.
  virtual MemorySource& buffers() const = 0;

  // Begins copies from `buffer` to tensors, which do not overlap, and says when they are done:
  // nothing where they are when it returns. Until then the buffer must not change. An error says
  // that nothing is going on.
  virtual Result<std::unique_ptr<DeviceEvent>> unpack(std::span<const TensorCopy> copies,
                                                      Bytes buffer) const = 0;

  // Likewise from tensors to `buffer`, where copies do not overlap. Until it is done, neither may
  // change. Bytes between copies that are not far apart may become zero: what else belongs there is
  // to be put there afterwards.
  virtual Result<std::unique_ptr<DeviceEvent>> pack(std::span<const TensorCopy> copies,
                                                    MutableBytes buffer) const = 0;

  // Has copies from and to memory that is not of `buffers` go on by themselves as well, until the
  // last copy of what is returned is gone; nothing where they do anyway. Requires: the memory is
  // there as long.
  virtual Result<std::shared_ptr<void>> pin(MutableBytes bytes) const = 0;
};

// Tensors in ordinary memory. Lives as long as the process.
const Device& cpu_device();

// Carries out `copy` in ordinary memory. Source and destination do not overlap.
void copy_on_cpu(const StridedCopy& copy, const std::byte* src, std::byte* dst);

// Copies `src` to `dst` and returns the CRC-32 of `crc`'s bytes followed by these, in one pass over
// ordinary memory. Requires: dst.size() == src.size(), no overlap.
uint32_t copy_and_checksum(Bytes src, MutableBytes dst, uint32_t crc);

}  // namespace torch_ckpt
