#pragma once

// Flattens and lists state dicts for planners, at less than a microsecond per tensor. Belongs to
// the module `_tensor_view`; tensor_view.cc implements the functions that read tensors.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "bindings/tensor_view.h"

namespace torch_ckpt {

// Returns whether an object is a torch.Tensor or an instance of a subclass.
bool is_tensor(pybind11::handle object);

// Returns whether an object is an exact torch.Tensor or Parameter that the engine can store.
bool is_plannable(pybind11::handle object);

// Returns facts of a tensor; box, FQN and replica have default values. nullopt unless
// is_plannable(object). Its sizes are valid for the lifetime of the tensor.
std::optional<TensorItem> describe(pybind11::handle object);

// Returns the sizes of a tensor, which for a DTensor are the global sizes. Valid for the lifetime
// of the tensor. Requires: is_tensor(object).
std::span<const int64_t> sizes_of(pybind11::handle object);

// Requires: is_tensor(object).
bool requires_grad(pybind11::handle object);

// Returns whether gradients are enabled in this thread.
bool is_grad_enabled();

// Returns the same as DCP's flatten_state_dict: values by FQN, and their paths.
// Raises ValueError if two values have the same FQN.
pybind11::tuple flatten(const pybind11::object& state_dict);

// The box of a shard, the sizes of the whole tensor, and its replica. Opaque to Python: converting
// the numbers would cost more than listing the shard.
struct ShardBox {
  Dims sizes;
  Dims offsets;
  Dims box_sizes;
  int32_t replica = -1;  // As in TensorItem.
};

// Cache of the boxes of DTensors' local tensors. DTensors with equal mesh, placements and sizes
// have the same box. Placements are compared by value, since every DTensor may have its own
// placement objects. Requires: the caller owns the GIL.
class ShardBoxes {
 public:
  // `dtensor`, `shard` and `replicate` are torch's classes. `box_of` is called with a DTensor and
  // returns its ShardBox, or None if it has none.
  ShardBoxes(pybind11::type dtensor, pybind11::type shard, pybind11::type replicate,
             pybind11::function box_of);

  // Returns the local tensor of an exact DTensor if the engine can store it and it has no
  // attributes in Python. Otherwise returns an empty object.
  pybind11::object local_of(pybind11::handle object) const;

  // Returns the box of a DTensor, or nullptr. Valid until the next call. Raises
  // the exceptions of `box_of`. Requires: local_of(dtensor) is not empty.
  const ShardBox* find(pybind11::handle dtensor);

 private:
  int64_t number_of(pybind11::handle object);
  void add_placement(pybind11::handle placement);

  const pybind11::type dtensor_;
  const pybind11::type shard_;
  const pybind11::type replicate_;
  const pybind11::function box_of_;
  pybind11::dict numbers_;  // Numbers of meshes and of unusual placements, by value.
  // The mesh of the last DTensor and its number. Most state dicts have one mesh.
  pybind11::object mesh_;
  int64_t mesh_number_ = -1;
  std::vector<int64_t> key_;  // Mesh, placements and sizes of the last DTensor, as numbers.
  std::map<std::vector<int64_t>, std::optional<ShardBox>> boxes_;
};

// Adds the tensors of a flat state dict to `sink`. Plannable tensors without attributes in Python,
// and DTensors of such tensors with a box in `boxes`, are the only values whose items are known
// here. For all others, calls `other` with FQN and value. `other` adds the items of the value and
// returns a list with the source object of each item.
//
// Returns the source object of every item, in the order of the items. Raises ValueError if `sink`
// rejects an item.
pybind11::list list_tensors(const pybind11::dict& flat, TensorSink& sink, ShardBoxes& boxes,
                            const pybind11::function& other);

}  // namespace torch_ckpt
