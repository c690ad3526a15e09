#pragma once

// Walks over state dicts, for planners: a hundred thousand tensors at a fraction of a microsecond
// each. A part of the module that knows torch, which answers the questions here (tensor_view.cc).

#include <pybind11/pybind11.h>

#include "bindings/tensor_view.h"

namespace torch_ckpt {

// Whether an object is a torch.Tensor or of a class derived from it.
bool is_tensor(pybind11::handle object);

// Whether it is an exact torch.Tensor or Parameter that the engine can store.
bool is_plannable(pybind11::handle object);

// What there is to know of one, but its name and its box. Requires: is_plannable(object).
TensorItem describe(pybind11::handle object);

// What DCP's flatten_state_dict returns: values by FQN, and their paths.
// Raises ValueError where two values have the same FQN.
pybind11::tuple flatten(const pybind11::object& state_dict);

// Lists a flat state dict in `sink`. Whatever is not plannable is left to `other`, which is called
// with its FQN and value, lists it itself, and returns a list of what it stored, item by item.
//
// Returns what each item is stored from, in the order of the items. Raises ValueError for what
// `sink` refuses.
pybind11::list list_tensors(const pybind11::dict& flat, TensorSink& sink,
                            const pybind11::function& other);

// Where a shard lies in a tensor of these sizes: the same for many of a state dict. Opaque to
// Python, which would take longer to hand over the numbers than to list the shard.
struct ShardBox {
  Dims sizes;
  Dims offsets;
  Dims box_sizes;
};

// Lists a shard: `local` is its tensor, which must be plannable; whether it requires a gradient the
// tensor that it is of knows better. Raises ValueError for what `sink` refuses.
void add_shard(TensorSink& sink, std::string_view fqn, const pybind11::object& local,
               bool requires_grad, const ShardBox& box);

}  // namespace torch_ckpt
