#pragma once

// Unpacking: the copies from one buffer to tensors.
//
// The caller adds copies while it scans the buffer, then starts them with one call per device. A
// device may complete its copies asynchronously. Meanwhile ReadStream reads into other buffers.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "base/strided.h"
#include "device/device.h"
#include "engine/dequantization.h"

namespace torch_ckpt {

// Used by one thread at a time. Has exclusive use of the buffer for its lifetime. Move-only.
class Unpacking {
 public:
  Unpacking() = default;
  explicit Unpacking(Bytes buffer) : buffer_(buffer) {}
  Unpacking(Unpacking&&) = default;
  Unpacking& operator=(Unpacking&& other) noexcept;
  ~Unpacking();  // Waits for the copies that were started.

  // Adds a copy to `tensor` on `device`. Source offsets of `copy` count from `from`, an address
  // within the buffer. A copy to host memory runs immediately; other copies run when `start` is
  // called. `name` is the FQN for messages. Requires: `name` and `device` outlive this object.
  Status add(const Device& device, const std::string& name, std::byte* tensor,
             const StridedCopy& copy, const std::byte* from);

  // Adds the products of a quantised piece, whose numbers begin at `from`. The device computes
  // them, from now on, or the CPU, immediately, if the device cannot or has no memory for that.
  // `strides` are those of the tensor.
  Status add_dequantized(const Device& device, const std::string& name, std::byte* tensor,
                         const Dims& strides, const Dequantization& dequantization,
                         const Box& piece, const std::byte* from);

  // Starts the added copies. Called once. Requires: the buffer does not change until they are done.
  Status start();

  // Whether all copies are done. Errors: that of a failed copy.
  Result<bool> done();

  // Waits until all copies are done, and returns the first error.
  Status wait();

 private:
  struct DeviceCopies {
    std::vector<TensorCopy> copies;
    std::vector<const std::string*> names;  // FQNs, without consecutive duplicates.
    std::vector<std::unique_ptr<DeviceEvent>> events;
  };
  Bytes buffer_;
  std::map<const Device*, DeviceCopies> by_device_;
};

}  // namespace torch_ckpt
