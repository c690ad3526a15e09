#pragma once

// What a rank keeps in memory of all that it holds, where other ranks of its machine hold the same.
//
// Replicas would be copied by each rank that has them, and be there as many times. So ranks that
// have once listed all that they hold share it out as for a save (GlobalPlan), and from then on
// each copies its part. Objects are in nobody's part: each rank keeps its own, for those of one FQN
// need not be the same. A rank whose list has changed since keeps, besides its part, what it did
// not have then, unless several others had it: one alone may have handed it over. Only what was its
// part for others, and is there no more, nobody would have.

#include <cstddef>
#include <vector>

#include "base/status.h"
#include "plan/assignment.h"
#include "plan/item.h"

namespace torch_ckpt {

// The tensors of a table, in its order.
ItemTable tensors_of(const ItemTable& table);

// What to keep of `table`: its objects, `part`, and such new tensors. `shared` are the
// tensors of all ranks when they shared them out, of which `part` is one of `shared[own]`.
// kMismatch where a tensor of the part, which another rank had too, is there no more; kCorruption
// for a part of other items. Requires: `own` is one of them.
Result<Assignment> kept_part(const ItemTable& table, const std::vector<const ItemTable*>& shared,
                             size_t own, const Assignment& part);

// What is assigned, as items of its own: what is cut is a shard. Errors: as of check_assignment.
Result<ItemTable> assigned_items(const ItemTable& table, const Assignment& assignment);

}  // namespace torch_ckpt
