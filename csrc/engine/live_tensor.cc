#include "engine/live_tensor.h"

#include "geometry/flat_range.h"
#include "geometry/overlap.h"

namespace torch_ckpt {

bool is_contiguous(const Dims& sizes, const Dims& strides, int64_t itemsize) {
  int64_t stride = itemsize;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != stride) return false;
    stride *= sizes[d];
  }
  return true;
}

bool is_contiguous(const LiveTensor& tensor) {
  return is_contiguous(tensor.sizes, tensor.strides, itemsize(tensor.dtype));
}

void pack_elements(const LiveTensor& tensor, int64_t begin, int64_t end, MutableBytes out) {
  const int64_t size = itemsize(tensor.dtype);
  std::byte* to = out.data();
  for (const Box& box : flat_range_to_boxes(tensor.sizes, begin, end)) {
    Dims packed = contiguous_strides(box.sizes);
    for (int64_t& stride : packed) stride *= size;
    copy_on_cpu(copy_of_box(box, size, 0, tensor.strides, packed), tensor.data, to);
    to += *checked_numel(box.sizes) * size;
  }
}

}  // namespace torch_ckpt
