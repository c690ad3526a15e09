#pragma once

// Tensors for tests: memory of their own, filled with seeded bytes, and any strided view of it.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "engine/live_tensor.h"
#include "engine/tensor_view.h"
#include "support/strided_oracle.h"

namespace torch_ckpt {

inline std::vector<std::byte> random_bytes(int64_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(static_cast<size_t>(nbytes));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A strided view that keeps its memory alive. Copies share the memory.
struct TestTensor {
  LiveTensor live;
  std::shared_ptr<std::vector<std::byte>> memory;

  // A contiguous tensor of seeded bytes.
  static TestTensor random(const std::string& name, DType dtype, Dims sizes, uint32_t seed = 1) {
    const int64_t size = itemsize(dtype);
    TestTensor out;
    out.memory =
        std::make_shared<std::vector<std::byte>>(random_bytes(*checked_numel(sizes) * size, seed));
    out.live = {.name = name, .dtype = dtype, .sizes = sizes, .strides = {}};
    out.live.strides = times(contiguous_strides(sizes), size);
    out.live.data = out.memory->data();
    return out;
  }

  // The same elements `offset` bytes behind the beginning of a page. Requires: contiguous.
  TestTensor in_page(int64_t offset) const {
    TestTensor out = *this;
    out.memory = std::make_shared<std::vector<std::byte>>(memory->size() + 8192);
    const auto begin = reinterpret_cast<uintptr_t>(out.memory->data());
    out.live.data = out.memory->data() + (4096 - begin % 4096) % 4096 + offset;
    std::ranges::copy(*memory, out.live.data);
    return out;
  }

  TestTensor transposed(size_t a, size_t b) const {
    TestTensor out = *this;
    std::swap(out.live.sizes[a], out.live.sizes[b]);
    std::swap(out.live.strides[a], out.live.strides[b]);
    return out;
  }

  // A new outermost dimension that repeats the tensor.
  TestTensor expanded(int64_t count) const {
    TestTensor out = *this;
    out.live.sizes.insert(out.live.sizes.begin(), count);
    out.live.strides.insert(out.live.strides.begin(), 0);
    return out;
  }

  TestTensor narrowed(const Dims& offsets, const Dims& sizes) const {
    TestTensor out = *this;
    out.live.data += dot(offsets, live.strides);
    out.live.sizes = sizes;
    return out;
  }

  // The elements in row-major order, one by one.
  std::string packed() const {
    std::string out;
    for_each_index(live.sizes, [&](const Dims& index) {
      const std::byte* element = live.data + dot(index, live.strides);
      out.append(reinterpret_cast<const char*>(element), static_cast<size_t>(itemsize(live.dtype)));
    });
    return out;
  }
};

inline TensorView view_of(const TestTensor& tensor) {
  TensorView view;
  view.dtype = tensor.live.dtype;
  view.sizes = tensor.live.sizes;
  view.strides = tensor.live.strides;
  view.data = tensor.live.data;
  return view;
}

}  // namespace torch_ckpt
