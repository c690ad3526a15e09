#include "plan/own_share.h"

#include "geometry/box.h"

namespace torch_ckpt {
namespace {

Status add_tensor(const ItemTable& from, int64_t item, ItemKind kind, const Box& box,
                  ItemTable* to) {
  RETURN_IF_ERROR(to->add_tensor(from.fqn(item), from.facts(item), kind, box));
  if (from.replica(item) != kNoReplica) to->set_replica(from.replica(item));
  return ok_status();
}

Status add_item(const ItemTable& from, int64_t item, ItemTable* to) {
  if (from.kind(item) == ItemKind::kObject) {
    return to->add_object(from.fqn(item), from.nbytes(item));
  }
  return add_tensor(from, item, from.kind(item), to_box(from.box(item)), to);
}

void add_run(int64_t item, Assignment* to) {
  if (to->runs.empty() || to->runs.back().first + to->runs.back().count < item) {
    to->runs.push_back({item, 0});
  }
  ++to->runs.back().count;
}

}  // namespace

ItemTable tensors_of(const ItemTable& table) {
  ItemTable out;
  for (int64_t item = 0; item < table.size(); ++item) {
    // Cannot fail: the item is already valid in `table`.
    if (table.kind(item) != ItemKind::kObject) (void)add_item(table, item, &out);
  }
  return out;
}

Result<Assignment> own_share(const ItemTable& table, const Assignment& of_tensors) {
  RETURN_IF_ERROR(check_assignment(of_tensors, tensors_of(table)));
  Assignment out;
  out.item_count = table.size();
  auto run = of_tensors.runs.begin();
  auto cut = of_tensors.cuts.begin();
  int64_t tensor = 0;
  for (int64_t item = 0; item < table.size(); ++item) {
    if (table.kind(item) == ItemKind::kObject) {
      add_run(item, &out);
      continue;
    }
    if (run != of_tensors.runs.end() && tensor == run->first + run->count) ++run;
    if (run != of_tensors.runs.end() && tensor >= run->first) add_run(item, &out);
    if (cut != of_tensors.cuts.end() && tensor == cut->item) {
      out.cuts.push_back({item, cut->first_row, cut->rows});
      ++cut;
    }
    ++tensor;
  }
  return out;
}

Result<ItemTable> assigned_items(const ItemTable& table, const Assignment& assignment) {
  RETURN_IF_ERROR(check_assignment(assignment, table));
  ItemTable out;
  auto cut = assignment.cuts.begin();
  for (const Run& run : assignment.runs) {
    for (int64_t item = run.first; item < run.first + run.count; ++item) {
      if (cut == assignment.cuts.end() || cut->item != item) {
        RETURN_IF_ERROR(add_item(table, item, &out));
        continue;
      }
      RETURN_IF_ERROR(
          add_tensor(table, item, ItemKind::kShard, cut_box(table.box(item), *cut), &out));
      ++cut;
    }
  }
  return out;
}

}  // namespace torch_ckpt
