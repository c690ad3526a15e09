#include "base/strided.h"

#include <algorithm>

#include "base/bytes.h"

namespace torch_ckpt {

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (size_t d = 0; d < dims.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(dims[d]);
  }
  return text + "]";
}

std::optional<int64_t> checked_numel(const Dims& sizes) {
  // A size of 0 makes the tensor empty, even if the product of the other sizes overflows.
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    if (size == 0) empty = true;
  }
  if (empty) return 0;
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    const auto product = checked_mul(numel, size);
    if (!product) return std::nullopt;
    numel = *product;
  }
  return numel;
}

Dims contiguous_strides(const Dims& sizes) {
  Dims strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

StridedCopy simplified(const StridedCopy& copy) {
  StridedCopy out;
  out.itemsize = copy.itemsize;
  out.src_offset = copy.src_offset;
  out.dst_offset = copy.dst_offset;
  for (size_t d = 0; d < copy.sizes.size(); ++d) {
    const int64_t size = copy.sizes[d];
    if (size == 1) continue;
    // Merge: the stride of the outer dimension equals the extent of this dimension on both sides.
    if (!out.sizes.empty() && out.src_strides.back() == size * copy.src_strides[d] &&
        out.dst_strides.back() == size * copy.dst_strides[d]) {
      out.sizes.back() *= size;
      out.src_strides.back() = copy.src_strides[d];
      out.dst_strides.back() = copy.dst_strides[d];
      continue;
    }
    out.sizes.push_back(size);
    out.src_strides.push_back(copy.src_strides[d]);
    out.dst_strides.push_back(copy.dst_strides[d]);
  }
  return out;
}

}  // namespace torch_ckpt
