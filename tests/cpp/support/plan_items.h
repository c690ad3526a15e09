#pragma once

// Items of plans for tests: short to write, random, and compared one by one.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "plan/item.h"
#include "support/status_matchers.h"
#include "support/strided_oracle.h"

namespace torch_ckpt {

// One item as it is added to a table.
struct PlanItem {
  std::string fqn;
  Facts facts;
  ItemKind kind = ItemKind::kObject;
  Box box;
  int64_t nbytes = 0;
  int32_t replica = kNoReplica;

  bool operator==(const PlanItem&) const = default;
};

inline void PrintTo(const PlanItem& item, std::ostream* out) {
  *out << item.fqn << " " << static_cast<int>(item.kind) << " " << to_string(item.facts) << " "
       << to_string(item.box) << " " << item.nbytes << " " << item.replica;
}

inline Facts float_facts(Dims sizes) {
  return {.is_tensor = true,
          .dtype = "float32",
          .itemsize = 4,
          .memory_format = "contiguous_format",
          .sizes = std::move(sizes)};
}

inline PlanItem object_item(std::string fqn, int64_t nbytes) {
  return {std::move(fqn), Facts{}, ItemKind::kObject, {}, nbytes, kNoReplica};
}

inline PlanItem shard_item(std::string fqn, Facts facts, Dims offsets, Dims sizes) {
  int64_t nbytes = facts.itemsize;
  for (const int64_t size : sizes) nbytes *= size;
  return {std::move(fqn),   std::move(facts),
          ItemKind::kShard, {std::move(offsets), std::move(sizes)},
          nbytes,           kNoReplica};
}

inline PlanItem float_shard(std::string fqn, Dims global, Dims offsets, Dims sizes) {
  return shard_item(std::move(fqn), float_facts(std::move(global)), std::move(offsets),
                    std::move(sizes));
}

inline PlanItem whole_item(std::string fqn, Facts facts) {
  const Dims sizes = facts.sizes;
  PlanItem item = shard_item(std::move(fqn), std::move(facts), Dims(sizes.size()), sizes);
  item.kind = ItemKind::kTensor;
  return item;
}

inline Status add_item(const PlanItem& item, ItemTable* table) {
  RETURN_IF_ERROR(item.kind == ItemKind::kObject
                      ? table->add_object(item.fqn, item.nbytes)
                      : table->add_tensor(item.fqn, item.facts, item.kind, item.box));
  if (item.replica != kNoReplica) table->set_replica(item.replica);
  return ok_status();
}

inline ItemTable table_of(const std::vector<PlanItem>& items) {
  ItemTable table;
  for (const PlanItem& item : items) EXPECT_OK(add_item(item, &table));
  return table;
}

inline std::vector<PlanItem> items_of(const ItemTable& table) {
  std::vector<PlanItem> items;
  for (int64_t i = 0; i < table.size(); ++i) {
    items.push_back({std::string(table.fqn(i)), table.facts(i), table.kind(i), to_box(table.box(i)),
                     table.nbytes(i), table.replica(i)});
  }
  return items;
}

// Items of all kinds, whose FQNs share beginnings and whose boxes may lie anywhere.
inline std::vector<PlanItem> random_items(std::mt19937& random, int64_t count) {
  std::vector<PlanItem> entries;
  for (int64_t i = 0; i <= pick(random, count + 1); ++i) {
    std::string fqn = (pick(random, 3) == 0 ? "model.layers." : "optim.state.") +
                      std::to_string(pick(random, 30)) + "." + std::to_string(i);
    if (pick(random, 4) == 0) {
      entries.push_back(object_item(fqn, 0));
      continue;
    }
    Facts facts = float_facts(Dims(
        static_cast<size_t>(pick(random, 5) == 0 ? pick(random, kMaxNdim + 1) : pick(random, 4))));
    for (int64_t& size : facts.sizes) size = facts.sizes.size() > 4 ? 1 : pick(random, 300);
    if (pick(random, 3) == 0) facts.dtype = "bfloat16", facts.itemsize = 2;
    facts.requires_grad = pick(random, 2) == 0;
    facts.pin_memory = pick(random, 2) == 0;
    facts.is_opaque = pick(random, 4) == 0;
    entries.push_back(whole_item(fqn, facts));
  }
  std::vector<PlanItem> items;
  const bool are_named = pick(random, 3) == 0;
  for (int64_t i = 0; i < count; ++i) {
    PlanItem item = entries[static_cast<size_t>(pick(random, std::ssize(entries)))];
    if (item.kind == ItemKind::kObject) {
      item.nbytes = pick(random, 100000);
    } else if (pick(random, 3) > 0) {
      Dims offsets = item.box.offsets;
      Dims sizes = item.box.sizes;
      for (size_t d = 0; d < sizes.size(); ++d) {
        if (pick(random, 2) == 0) continue;
        offsets[d] = pick(random, sizes.size() > 4 ? 2 : 400);
        sizes[d] = pick(random, sizes.size() > 4 ? 2 : 400);
      }
      item = shard_item(item.fqn, item.facts, offsets, sizes);
    }
    if (are_named && item.kind != ItemKind::kObject && pick(random, 4) > 0) {
      item.replica = static_cast<int32_t>(pick(random, 3) == 0 ? 0x7FFFFFFE : pick(random, 3));
    }
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace torch_ckpt
