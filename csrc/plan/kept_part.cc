#include "plan/kept_part.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "geometry/box.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kNone = -1;

Status add_item(const ItemTable& from, int64_t item, ItemTable* to) {
  if (from.kind(item) == ItemKind::kObject) {
    return to->add_object(from.fqn(item), from.nbytes(item));
  }
  return to->add_tensor(from.fqn(item), from.facts(item), from.kind(item), to_box(from.box(item)));
}

// Finds the items of a table again, by what they are.
class Lookup {
 public:
  explicit Lookup(const ItemTable& table)
      : table_(table), first_(static_cast<size_t>(table.entries().size()), kNone) {
    for (int64_t item = table.size() - 1; item >= 0; --item) {
      int64_t& first = first_[static_cast<size_t>(table.entry(item))];
      next_.push_back(first);
      first = item;
    }
    std::ranges::reverse(next_);
  }

  // The item that is the same as one of another table, or kNone.
  int64_t find(const ItemTable& other, int64_t item) const {
    const int64_t entry = table_.entries().find(other.fqn(item));
    if (entry < 0) return kNone;
    const Facts& facts = table_.entries().facts(entry);
    if (!agree(facts, other.facts(item)) || facts.is_opaque != other.facts(item).is_opaque) {
      return kNone;
    }
    const BoxView box = other.box(item);
    int64_t found = first_[static_cast<size_t>(entry)];
    while (found != kNone && !is_same(table_.box(found), box)) {
      found = next_[static_cast<size_t>(found)];
    }
    return found;
  }

 private:
  static bool is_same(const BoxView& a, const BoxView& b) {
    return std::ranges::equal(a.offsets, b.offsets) && std::ranges::equal(a.sizes, b.sizes);
  }

  const ItemTable& table_;
  std::vector<int64_t> first_;  // Of each entry.
  std::vector<int64_t> next_;   // Of each item, the next of its entry.
};

// What the other ranks had; looked up only if something has changed, which is rare.
class Others {
 public:
  Others(const std::vector<const ItemTable*>& tables, size_t own) : tables_(tables), own_(own) {}

  // How many had an item of a table.
  int64_t holders(const ItemTable& table, int64_t item) {
    for (size_t i = lookups_.size(); i + 1 < tables_.size(); ++i) {
      lookups_.emplace_back(*tables_[i < own_ ? i : i + 1]);
    }
    return std::ranges::count_if(
        lookups_, [&](const Lookup& of_rank) { return of_rank.find(table, item) != kNone; });
  }

 private:
  const std::vector<const ItemTable*>& tables_;
  const size_t own_;
  std::vector<Lookup> lookups_;
};

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
    // What one table has taken, another takes.
    if (table.kind(item) != ItemKind::kObject) (void)add_item(table, item, &out);
  }
  return out;
}

Result<Assignment> kept_part(const ItemTable& table, const std::vector<const ItemTable*>& shared,
                             size_t own, const Assignment& part) {
  const ItemTable& former = *shared[own];
  RETURN_IF_ERROR(check_assignment(part, former));
  // By item of `former`: whether it is of the part and still to be found, and its cut.
  std::vector<bool> wanted(static_cast<size_t>(former.size()));
  std::vector<std::optional<Cut>> cuts(static_cast<size_t>(former.size()));
  for (const Run& run : part.runs) {
    std::fill_n(wanted.begin() + run.first, run.count, true);
  }
  for (const Cut& cut : part.cuts) cuts[static_cast<size_t>(cut.item)] = cut;
  const Lookup known(former);
  Others others(shared, own);
  Assignment out;
  out.item_count = table.size();
  for (int64_t item = 0; item < table.size(); ++item) {
    if (table.kind(item) == ItemKind::kObject) {
      add_run(item, &out);
      continue;
    }
    const int64_t at = known.find(table, item);
    if (at == kNone) {
      // One alone may have let go of it, as it is nobody's part but its own.
      if (others.holders(table, item) < 2) add_run(item, &out);
      continue;
    }
    if (!wanted[static_cast<size_t>(at)]) continue;
    wanted[static_cast<size_t>(at)] = false;
    add_run(item, &out);
    const std::optional<Cut>& cut = cuts[static_cast<size_t>(at)];
    if (cut) out.cuts.push_back({item, cut->first_row, cut->rows});
  }
  for (int64_t item = 0; item < former.size(); ++item) {
    // What nobody else had is simply no more.
    if (!wanted[static_cast<size_t>(item)] || others.holders(former, item) == 0) continue;
    return mismatch("'", former.fqn(item),
                    "' was this rank's to copy for all ranks of its machine ",
                    "that hold it, and it does not hold it as before");
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
      RETURN_IF_ERROR(out.add_tensor(table.fqn(item), table.facts(item), ItemKind::kShard,
                                     cut_box(table.box(item), *cut)));
      ++cut;
    }
  }
  return out;
}

}  // namespace torch_ckpt
