#pragma once

// What the ranks of a job would write, for tests of what is planned from it.

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/global_plan.h"
#include "plan/plan_wire.h"
#include "support/plan_items.h"

namespace torch_ckpt {

using World = std::vector<std::vector<PlanItem>>;  // What each rank would write.

using Digests = std::vector<std::vector<uint64_t>>;  // Of the values of each item of each rank.

inline Result<GlobalPlan> plan(const World& world, const GlobalPlanOptions& options = {},
                               const Digests& digests = {}) {
  std::vector<std::vector<std::byte>> wires;
  for (const auto& items : world) wires.push_back(encode(table_of(items)));
  std::vector<Bytes> of_values;
  for (const auto& of_rank : digests) of_values.push_back(std::as_bytes(std::span(of_rank)));
  return GlobalPlan::make({wires.begin(), wires.end()}, options, of_values);
}

// The part of [0, size) that the i-th of `count` ranks has, as torch.chunk cuts it: the last ones
// may have less, or nothing.
inline std::pair<int64_t, int64_t> chunk_of(int64_t size, int64_t count, int64_t i) {
  const int64_t length = (size + count - 1) / count;
  const int64_t begin = std::min(size, i * length);
  return {begin, std::min(size, begin + length) - begin};
}

// Tensors on a random mesh of up to three dimensions, each replicated or sharded along each of
// them, and objects; every rank lists them in its own order.
inline World random_world(std::mt19937& random) {
  const int64_t mesh[3] = {1 + pick(random, 4), 1 + pick(random, 3), 1 + pick(random, 3)};
  World world(static_cast<size_t>(mesh[0] * mesh[1] * mesh[2]));
  for (int64_t t = pick(random, 12); t > 0; --t) {
    const std::string fqn = "model." + std::to_string(t);
    if (pick(random, 4) == 0) {
      for (auto& items : world) {
        if (&items == &world[0] || pick(random, 3) > 0) items.push_back(object_item(fqn, 100));
      }
      continue;
    }
    Dims sizes(static_cast<size_t>(pick(random, 4)));
    for (int64_t& size : sizes) size = pick(random, pick(random, 4) == 0 ? 400 : 9);
    int64_t sharded_by[3];  // The dimension that a mesh dimension shards, or -1.
    std::set<int64_t> taken;
    for (int64_t& d : sharded_by) {
      d = sizes.empty() || pick(random, 2) == 0 ? -1 : pick(random, std::ssize(sizes));
      if (!taken.insert(d).second) d = -1;
    }
    for (int64_t rank = 0; rank < std::ssize(world); ++rank) {
      const int64_t at[3] = {rank / (mesh[1] * mesh[2]), rank / mesh[2] % mesh[1], rank % mesh[2]};
      Dims offsets(sizes.size());
      Dims local = sizes;
      for (int m = 0; m < 3; ++m) {
        if (sharded_by[m] < 0) continue;
        const auto d = static_cast<size_t>(sharded_by[m]);
        std::tie(offsets[d], local[d]) = chunk_of(sizes[d], mesh[m], at[m]);
      }
      world[static_cast<size_t>(rank)].push_back(float_shard(fqn, sizes, offsets, local));
    }
  }
  if (pick(random, 2) == 0) {
    for (auto& items : world) {
      for (size_t i = items.size(); i > 1; --i) {
        std::swap(items[i - 1], items[static_cast<size_t>(pick(random, static_cast<int64_t>(i)))]);
      }
    }
  }
  return world;
}

}  // namespace torch_ckpt
