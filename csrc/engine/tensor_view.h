#pragma once

// TensorView: what the engine needs to read or write the memory of a torch tensor. The binding
// layer creates the views, because the engine does not include torch.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/strided.h"
#include "engine/live_tensor.h"

namespace torch_ckpt {

// A view of a plain tensor. Shares ownership of the memory.
struct TensorView {
  std::string name;  // FQN.
  DType dtype = DType::kUInt8;
  Dims sizes;
  Dims strides;  // In bytes.
  std::byte* data = nullptr;
  bool writable = false;
  int gpu = -1;         // CUDA device index; -1 for host memory.
  uint64_t stream = 0;  // CUDA handle of torch's current stream on that GPU.
  std::shared_ptr<void> storage;
};

// How the engine can access a tensor's memory.
enum class TensorKind {
  kPlain,      // Directly: a strided CPU tensor whose memory contains its values.
  kNeedsCopy,  // Through a plain CPU copy: on another device, or lazily conjugated or negated.
  kTorchOnly,  // Not at all: subclass, quantized, sparse, meta, or a dtype the engine lacks.
};

// Parallel vectors with one entry per tensor. Views have no names. A view has memory only if its
// tensor is plain, and is empty for kTorchOnly. Where a load writes the tensors, a GPU tensor also
// counts as plain.
struct TensorBatch {
  std::vector<TensorView> views;
  std::vector<TensorKind> kinds;
};

// Returns the live tensor of a view in host memory. Valid for the lifetime of the view.
inline LiveTensor to_live(const TensorView& view) {
  return {.name = view.name,
          .dtype = view.dtype,
          .sizes = view.sizes,
          .strides = view.strides,
          .data = view.data};
}

}  // namespace torch_ckpt
