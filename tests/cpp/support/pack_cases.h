#pragma once

// Lists of copies between tensors and a staging buffer, at random, and what the CPU device makes of
// them: for tests of whatever carries out plans.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "device/device.h"
#include "device/pack_plan.h"
#include "support/status_matchers.h"
#include "support/strided_oracle.h"
#include "support/test_tensor.h"

namespace torch_ckpt {

// From the first byte to behind the last that one side of a copy touches.
inline int64_t extent(const StridedCopy& copy, bool source) {
  int64_t end = 0;
  for (const auto& [from, to] : element_pairs(copy)) {
    end = std::max(end, (source ? from : to) + copy.itemsize);
  }
  return end;
}

// Tensors in one memory, at any address, and places of their own in a staging buffer.
struct PackCase {
  PackDirection direction;
  std::vector<TensorCopy> copies;
  std::vector<int64_t> places;  // Of the tensors in `tensors`.
  std::vector<std::byte> tensors;
  std::vector<std::byte> staging;

  bool packs() const { return direction == PackDirection::kPack; }

  void add(std::mt19937& random, StridedCopy copy) {
    // To odd addresses and offsets now and then.
    const auto gap = [&] { return pick(random, 4) == 0 ? pick(random, 40) : 16; };
    const auto aligned = [&](int64_t at) { return pick(random, 4) == 0 ? at : align_up(at, 64); };
    const int64_t tensor_place = aligned(ssize(tensors) + gap());
    const int64_t staging_place = aligned(ssize(staging) + gap());
    (packs() ? copy.dst_offset : copy.src_offset) = staging_place;
    tensors.resize(static_cast<size_t>(tensor_place + extent(copy, packs())));
    staging.resize(static_cast<size_t>(std::max(ssize(staging), extent(copy, !packs()))));
    copies.push_back({nullptr, std::move(copy)});
    places.push_back(tensor_place);
  }

  void fill(uint32_t seed) {
    tensors = random_bytes(ssize(tensors), seed);
    staging = random_bytes(ssize(staging) + 7, seed + 1);
  }

  std::vector<TensorCopy> copies_in(std::byte* memory) const {
    std::vector<TensorCopy> out = copies;
    for (size_t i = 0; i < out.size(); ++i) out[i].tensor = memory + places[i];
    return out;
  }
};

// Strides of the staging side: dense, or rows of something wider.
inline Dims staging_strides(std::mt19937& random, const Dims& sizes, int64_t itemsize, bool dense) {
  Dims strides(sizes.size());
  int64_t extent = itemsize;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = extent;
    extent *= std::max<int64_t>(sizes[d], 1);
    if (!dense && pick(random, 3) == 0) extent += pick(random, 9) * itemsize;
  }
  return strides;
}

inline PackCase random_pack_case(uint32_t seed, PackDirection direction) {
  std::mt19937 random(seed);
  PackCase out;
  out.direction = direction;
  const int64_t itemsizes[] = {1, 2, 4, 8, 16, 3, 12};
  for (int64_t i = pick(random, 30); i >= 0; --i) {
    StridedCopy copy = random_copy(random, itemsizes[random() % std::size(itemsizes)]);
    if (pick(random, 3) == 0) {  // Contiguous, and longer than a warp takes at once.
      copy.sizes = {1 + pick(random, 3000)};
      copy.src_strides = copy.dst_strides = {copy.itemsize};
    }
    const Dims places = staging_strides(random, copy.sizes, copy.itemsize, out.packs());
    // What one copy reads may repeat, what it writes may not.
    (out.packs() ? copy.dst_strides : copy.src_strides) = places;
    if (out.packs()) copy.dst_offset = 0;
    if (!out.packs()) copy.src_offset = 0;
    out.add(random, copy);
  }
  out.fill(seed);
  return out;
}

// What the CPU device makes of both memories, one copy after another.
inline std::pair<std::vector<std::byte>, std::vector<std::byte>> packed_by_cpu(
    const PackCase& given) {
  std::vector<std::byte> tensors = given.tensors;
  std::vector<std::byte> staging = given.staging;
  for (const TensorCopy& copy : given.copies_in(tensors.data())) {
    copy_on_cpu(copy.copy, given.packs() ? copy.tensor : staging.data(),
                given.packs() ? staging.data() : copy.tensor);
  }
  return {tensors, staging};
}

}  // namespace torch_ckpt
