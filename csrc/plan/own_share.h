#pragma once

// What a rank copies of all that it holds, where other ranks of its machine hold the same.
//
// Each rank that has a replica would copy it, and it would be in memory as many times. So ranks
// share tensors out as for a save (GlobalPlan), and each copies its share. Objects are not shared
// out: each rank copies its own, for those of one FQN need not be the same.

#include "base/status.h"
#include "plan/assignment.h"
#include "plan/item.h"

namespace torch_ckpt {

// The tensors of a table, in its order.
ItemTable tensors_of(const ItemTable& table);

// All objects of `table`, and of its tensors those that are assigned: `of_tensors` is for
// tensors_of(table). kCorruption where it is for other items.
Result<Assignment> own_share(const ItemTable& table, const Assignment& of_tensors);

// What is assigned, as items of its own: what is cut is a shard. Errors: as of check_assignment.
Result<ItemTable> assigned_items(const ItemTable& table, const Assignment& assignment);

}  // namespace torch_ckpt
