#pragma once

// Tensors of the training process, on their way from the module that knows torch (tensor_view.cc)
// to the one that knows the engine. Opaque objects to Python, which hands them over.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "base/strided.h"

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
