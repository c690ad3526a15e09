#pragma once

// The interface between the two native modules: `_tensor_view` (tensor_view.cc), which uses torch,
// passes tensors of the training process to `_native`, the engine. Python passes them as opaque
// objects.

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "engine/tensor_view.h"

namespace torch_ckpt {

// A tensor or a box of a tensor, for planning. Valid only during the call that receives it.
struct TensorItem {
  std::string_view fqn;
  std::string_view dtype;  // torch's name of the dtype.
  int64_t itemsize = 0;
  bool requires_grad = false;
  bool pin_memory = false;
  bool is_shard = false;
  std::span<const int64_t> sizes;
  std::span<const int64_t> offsets;
  std::span<const int64_t> box_sizes;
  int32_t replica = -1;  // See ItemTable::set_replica; -1 if the replica has no name.
};

// Receives the tensors of a state dict one by one. PyItemTable in `_native` implements it.
class TensorSink {
 public:
  virtual ~TensorSink() = default;
  virtual Status add(const TensorItem& item) = 0;
};

}  // namespace torch_ckpt
