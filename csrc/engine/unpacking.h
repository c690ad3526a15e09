#pragma once

// What goes from one buffer to tensors: gathered while the buffer is looked through, then begun
// with one call for each device, however many tensors have a part in it. A device may take its
// time, and whoever owns the buffer does other things meanwhile: ReadStream reads into the next
// ones.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "base/strided.h"
#include "device/device.h"

namespace torch_ckpt {

// Used by one thread at a time. While it exists, the buffer belongs to it. Move-only.
class Unpacking {
 public:
  Unpacking() = default;
  explicit Unpacking(Bytes buffer) : buffer_(buffer) {}
  Unpacking(Unpacking&&) = default;
  Unpacking& operator=(Unpacking&& other) noexcept;
  ~Unpacking();  // Waits for what was begun.

  // Copies to `tensor` of a device: of `copy`, the source counts from `from`, within the buffer.
  // Into ordinary memory at once; else when `start` is called. `name`: FQN, for messages; it and
  // the device outlive this.
  Status add(const Device& device, const std::string& name, std::byte* tensor,
             const StridedCopy& copy, const std::byte* from);

  // Begins what was added. Until it is done, the buffer must not change. Called once.
  Status start();

  // Whether everything is done, or has failed.
  Result<bool> done();
  Status wait();

 private:
  struct OfDevice {
    std::vector<TensorCopy> copies;
    std::vector<const std::string*> names;  // No name twice in a row.
    std::unique_ptr<DeviceEvent> event;
  };
  Bytes buffer_;
  std::map<const Device*, OfDevice> parts_;
};

}  // namespace torch_ckpt
