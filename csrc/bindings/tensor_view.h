#pragma once

// The only door to libtorch: what the engine needs to know of a torch.Tensor. Its source is the one
// file that includes torch, whose headers take long to compile.

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/live_tensor.h"

namespace torch_ckpt {

// What must be done before the engine can read or write a tensor's memory.
enum class TensorKind {
  kPlain,      // Nothing: a strided CPU tensor whose memory holds its values.
  kNeedsCopy,  // Copy it to a plain CPU tensor: on another device, or lazily conjugated or negated.
  kTorchsOwn,  // Subclass, quantised, sparse, meta, or of a dtype the engine does not store.
};

// Requires: the GIL is held. Throws py::type_error for anything but a torch.Tensor.
TensorKind tensor_kind(pybind11::handle tensor);

// Whether the engine can read into the tensor's memory: it is kPlain, and no two of its elements
// share memory by a stride of 0.
bool is_loadable(pybind11::handle tensor);

// Which storage a tensor lies in, and where in it, in bytes: [begin, end). Empty where it has no
// elements or no memory.
struct TensorExtent {
  uintptr_t storage;
  int64_t begin;
  int64_t end;
};
TensorExtent tensor_extent(pybind11::handle tensor);

// Whether no other tensor shares the tensor's memory.
bool has_own_storage(pybind11::handle tensor);

// A view of a plain tensor, which keeps its memory alive.
struct HeldTensor {
  LiveTensor live;
  std::shared_ptr<void> storage;
};

// Throws py::value_error unless the tensor is kPlain, and with `writable`, is_loadable.
HeldTensor hold_tensor(pybind11::handle tensor, std::string name, bool writable);

}  // namespace torch_ckpt
