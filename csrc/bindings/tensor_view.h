#pragma once

// Tensors of the training process, on their way from the module that knows torch (tensor_view.cc)
// to the one that knows the engine. Opaque objects to Python, which hands them over.

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "engine/tensor_view.h"

namespace torch_ckpt {

// A tensor, or a box of one, that is to be planned. Valid for the call that it is an argument of.
struct TensorItem {
  std::string_view fqn;
  std::string_view dtype;  // As torch names it.
  int64_t itemsize = 0;
  bool requires_grad = false;
  bool pin_memory = false;
  bool is_shard = false;
  std::span<const int64_t> sizes;
  std::span<const int64_t> offsets;
  std::span<const int64_t> box_sizes;
};

// Takes the tensors of a state dict one by one: a table of items, in the other module.
class TensorSink {
 public:
  virtual ~TensorSink() = default;
  virtual Status add(const TensorItem& item) = 0;
};

}  // namespace torch_ckpt
