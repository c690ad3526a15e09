#pragma once

// Devices: the memory of tensors, and copies between tensors and the engine's buffers.
//
// `engine/` describes copies as plain values, and a device executes them. The CPU device is the
// reference: all other devices must produce the same bytes.

#include <cstdint>
#include <memory>
#include <span>

#include "base/bytes.h"
#include "base/memory.h"
#include "base/status.h"
#include "base/strided.h"
#include "device/product_lane.h"

namespace torch_ckpt {

// One copy between a tensor and a buffer. In `copy`, offsets of the tensor's side are relative to
// `tensor`, those of the other side to the start of the buffer.
struct TensorCopy {
  std::byte* tensor = nullptr;
  StridedCopy copy;
};

// A point in a device's sequence of work. Safe to use from any thread.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;

  // Blocks until all work before the event is done. Returns an error of any of that work.
  virtual Status wait() const = 0;
  virtual Result<bool> done() const = 0;
};

// Safe to call from any thread.
class Device {
 public:
  virtual ~Device() = default;

  // Returns whether tensors are in host memory, where files can be read to directly.
  virtual bool is_host() const = 0;

  // Returns the allocator of buffers for `unpack`. Valid as long as the device; allocated blocks
  // may live longer.
  virtual MemorySource& buffers() const = 0;

  // Starts copies from `buffer` to tensors that do not overlap. Returns an event for their end, or
  // null if all copies are already done. The buffer must not change until then. After an error, no
  // copy is running.
  virtual Result<std::unique_ptr<DeviceEvent>> unpack(std::span<const TensorCopy> copies,
                                                      Bytes buffer) const = 0;

  // Starts to compute products into a tensor, whose address `table` has. `codes` must not change
  // until the returned event. `values` and `scales`, of which the table has no addresses, are read
  // before the call returns. Otherwise as `unpack`. Errors: kUnsupported if the device computes no
  // products.
  virtual Result<std::unique_ptr<DeviceEvent>> multiply(const ProductTable& /*table*/,
                                                        Bytes /*codes*/,
                                                        std::span<const float> /*values*/,
                                                        std::span<const float> /*scales*/) const {
    return unsupported("this device computes no products");
  }

  // Starts copies from tensors to `buffer`, where they do not overlap. Neither may change until the
  // returned event. Short gaps between copies may become zero, so the caller fills gaps afterwards.
  virtual Result<std::unique_ptr<DeviceEvent>> pack(std::span<const TensorCopy> copies,
                                                    MutableBytes buffer) const = 0;

  // Makes copies from and to memory outside `buffers` asynchronous, until the last copy of the
  // returned pointer is destroyed. Returns null if they already are.
  // Requires: the memory outlives the returned pointer.
  virtual Result<std::shared_ptr<void>> pin(MutableBytes bytes) const = 0;
};

// Returns the device of tensors in host memory. Valid until the process exits.
const Device& cpu_device();

// Executes `copy` in host memory. Requires: source and destination do not overlap.
void copy_on_cpu(const StridedCopy& copy, const std::byte* src, std::byte* dst);

// Copies `src` to `dst` in host memory. Returns `crc` extended by the CRC-32 of the copied bytes,
// computed in the same pass.
// Requires: dst.size() == src.size(); no overlap.
uint32_t copy_and_checksum(Bytes src, MutableBytes dst, uint32_t crc);

}  // namespace torch_ckpt
