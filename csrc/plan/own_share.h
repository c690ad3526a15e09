#pragma once

// The share of its items that one rank copies, if other ranks of its machine have replicas of them.
//
// Without sharing, each rank with a replica would copy the tensor, and shared memory would store
// several copies. The ranks therefore distribute tensors as a save does (GlobalPlan), and each rank
// copies its share. Objects are not distributed: objects with the same FQN may differ between
// ranks.

#include "base/status.h"
#include "plan/assignment.h"
#include "plan/item.h"

namespace torch_ckpt {

// Returns the tensors of a table, in the same order.
ItemTable tensors_of(const ItemTable& table);

// Returns an assignment of all objects of `table` and of the assigned tensors. `of_tensors` is an
// assignment for tensors_of(table); kCorruption if it is for another table.
Result<Assignment> own_share(const ItemTable& table, const Assignment& of_tensors);

// Returns the assigned items as a new table. Cut items become shards.
// Errors: those of check_assignment.
Result<ItemTable> assigned_items(const ItemTable& table, const Assignment& assignment);

}  // namespace torch_ckpt
