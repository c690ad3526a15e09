#pragma once

// Strided regions the slow and obvious way, element by element, for tests to compare with.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "base/strided.h"

namespace torch_ckpt {

// Calls `visit` with every index of a tensor of these sizes, in row-major order.
template <typename Visit>
void for_each_index(const Dims& sizes, const Visit& visit) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  Dims index(sizes.size(), 0);
  while (true) {
    visit(index);
    size_t d = sizes.size();
    while (d > 0 && ++index[d - 1] == sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

inline int64_t dot(const Dims& index, const Dims& strides) {
  return std::inner_product(index.begin(), index.end(), strides.begin(), int64_t{0});
}

inline Dims times(Dims dims, int64_t factor) {
  for (int64_t& dim : dims) dim *= factor;
  return dims;
}

// Where every element of a copy comes from and goes to, in row-major order.
using ElementPairs = std::vector<std::pair<int64_t, int64_t>>;

inline ElementPairs element_pairs(const StridedCopy& copy) {
  ElementPairs pairs;
  for_each_index(copy.sizes, [&](const Dims& index) {
    pairs.emplace_back(copy.src_offset + dot(index, copy.src_strides),
                       copy.dst_offset + dot(index, copy.dst_strides));
  });
  return pairs;
}

inline ElementPairs sorted(ElementPairs pairs) {
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

// A number in [0, below), the same with every library.
inline int64_t pick(std::mt19937& random, int64_t below) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(below));
}

// Strides in bytes of some tensor of these sizes whose elements do not overlap: its dimensions lie
// in any order, some with a gap behind them. `repeats` lets some dimensions have stride 0, as
// after expand().
inline Dims random_strides(std::mt19937& random, const Dims& sizes, int64_t itemsize,
                           bool repeats) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (pick(random, 2) == 0) std::shuffle(order.begin(), order.end(), random);
  Dims strides(sizes.size());
  int64_t extent = itemsize;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t d = order[i];
    if (sizes[d] == 1 || (repeats && pick(random, 6) == 0)) {
      strides[d] = sizes[d] == 1 ? pick(random, 1000) * itemsize : 0;
      continue;
    }
    if (pick(random, 4) == 0) extent += pick(random, 5) * itemsize;
    strides[d] = extent;
    extent *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

inline Dims random_sizes(std::mt19937& random, int64_t most_dims, int64_t most) {
  Dims sizes(static_cast<size_t>(pick(random, most_dims + 1)));
  for (int64_t& size : sizes) size = pick(random, 4) == 0 ? 1 : 1 + pick(random, most);
  if (!sizes.empty() && pick(random, 20) == 0) sizes[random() % sizes.size()] = 0;
  return sizes;
}

// Every element of the destination is written at most once.
inline StridedCopy random_copy(std::mt19937& random, int64_t itemsize) {
  StridedCopy copy;
  copy.itemsize = itemsize;
  copy.sizes = random_sizes(random, 4, 6);
  copy.src_offset = pick(random, 50) * itemsize;
  copy.src_strides = random_strides(random, copy.sizes, itemsize, true);
  copy.dst_offset = pick(random, 50) * itemsize;
  copy.dst_strides = random_strides(random, copy.sizes, itemsize, false);
  return copy;
}

}  // namespace torch_ckpt
