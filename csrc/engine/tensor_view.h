#pragma once

// A tensor that whoever knows torch has looked at: what the engine needs to read or write its
// memory, and the memory kept alive.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/strided.h"
#include "engine/live_tensor.h"

namespace torch_ckpt {

// A view of a plain tensor, which keeps its memory alive.
struct TensorView {
  std::string name;  // FQN.
  DType dtype = DType::kUInt8;
  Dims sizes;
  Dims strides;  // In bytes.
  std::byte* data = nullptr;
  bool writable = false;
  int gpu = -1;         // In whose memory it lies; -1 for ordinary memory.
  uint64_t stream = 0;  // Torch's current one of that GPU, as CUDA's handle.
  std::shared_ptr<void> storage;
};

// What must be done before the engine can read or write a tensor's memory.
enum class TensorKind {
  kPlain,      // Nothing: a strided CPU tensor whose memory holds its values.
  kNeedsCopy,  // Copy it to a plain CPU tensor: on another device, or lazily conjugated or negated.
  kTorchsOwn,  // Subclass, quantised, sparse, meta, or of a dtype the engine does not store.
};

// Tensors side by side, each with a view of it: without memory unless it is plain, and empty for
// one that is torch's own. Without names. To be written, one in the memory of a GPU is plain, too.
struct TensorBatch {
  std::vector<TensorView> views;
  std::vector<TensorKind> kinds;
};

// A live tensor of a view in ordinary memory, valid as long as the view is.
inline LiveTensor to_live(const TensorView& view) {
  return {.name = view.name,
          .dtype = view.dtype,
          .sizes = view.sizes,
          .strides = view.strides,
          .data = view.data};
}

}  // namespace torch_ckpt
