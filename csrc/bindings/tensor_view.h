#pragma once

// A tensor of the training process, on its way from the module that knows torch (tensor_view.cc) to
// the one that knows the engine. An opaque object to Python, which hands it over.

#include <cstddef>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/strided.h"

namespace torch_ckpt {

// A view of a plain CPU tensor, which keeps its memory alive.
struct TensorView {
  std::string name;  // FQN.
  DType dtype = DType::kUInt8;
  Dims sizes;
  Dims strides;  // In bytes.
  std::byte* data = nullptr;
  bool writable = false;
  std::shared_ptr<void> storage;
};

}  // namespace torch_ckpt
