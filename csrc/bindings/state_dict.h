#pragma once

// Walks over state dicts, for planners: a hundred thousand tensors at a fraction of a microsecond
// each. A part of the module that knows torch, which answers the questions here (tensor_view.cc).

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "bindings/tensor_view.h"

namespace torch_ckpt {

// Whether an object is a torch.Tensor or of a class derived from it.
bool is_tensor(pybind11::handle object);

// Whether it is an exact torch.Tensor or Parameter that the engine can store.
bool is_plannable(pybind11::handle object);

// Dtype and memory of one, and nothing else. Requires: is_plannable(object).
TensorItem describe(pybind11::handle object);

// The sizes of a tensor; of a DTensor, of the whole. Valid while it is. Requires:
// is_tensor(object).
std::span<const int64_t> sizes_of(pybind11::handle object);

// Requires: is_tensor(object).
bool requires_grad(pybind11::handle object);

// Whether this thread computes gradients.
bool is_grad_enabled();

// What DCP's flatten_state_dict returns: values by FQN, and their paths.
// Raises ValueError where two values have the same FQN.
pybind11::tuple flatten(const pybind11::object& state_dict);

// Where a shard lies in a tensor of these sizes: the same for many of a state dict. Opaque to
// Python, which would take longer to hand over the numbers than to list the shard.
struct ShardBox {
  Dims sizes;
  Dims offsets;
  Dims box_sizes;
};

// Where the local parts of DTensors lie. Knows it of all of the same mesh, placements and sizes
// once it was told of one of them; these are compared by value, for every tensor may have objects
// of its own. For whoever holds the GIL.
class ShardBoxes {
 public:
  // `dtensor`, `shard` and `replicate` are torch's classes. `box_of` is called with a DTensor and
  // returns its ShardBox, or None where it has none.
  ShardBoxes(pybind11::type dtensor, pybind11::type shard, pybind11::type replicate,
             pybind11::function box_of);

  // The local part of an exact DTensor that the engine can store; nothing of any other object.
  pybind11::object local_of(pybind11::handle object) const;

  // Valid until the next call; nullptr where there is none. Requires: local_of(dtensor). Raises
  // what `box_of` raises.
  const ShardBox* find(pybind11::handle dtensor);

 private:
  int64_t number_of(pybind11::handle object);
  void add_placement(pybind11::handle placement);

  const pybind11::type dtensor_;
  const pybind11::type shard_;
  const pybind11::type replicate_;
  const pybind11::function box_of_;
  pybind11::dict numbers_;  // Of meshes and of odd placements, by what they are equal to.
  pybind11::object mesh_;   // The last one, and its number: mostly there is but one.
  int64_t mesh_number_ = -1;
  std::vector<int64_t> key_;  // What a box depends on, as numbers.
  std::map<std::vector<int64_t>, std::optional<ShardBox>> boxes_;
};

// Lists a flat state dict in `sink`. What neither is plannable nor has a box in `boxes` is left to
// `other`, which is called with its FQN and value, lists it itself, and returns a list of what it
// stored, item by item.
//
// Returns what each item is stored from, in the order of the items. Raises ValueError for what
// `sink` refuses.
pybind11::list list_tensors(const pybind11::dict& flat, TensorSink& sink, ShardBoxes& boxes,
                            const pybind11::function& other);

}  // namespace torch_ckpt
