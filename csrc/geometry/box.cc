#include "geometry/box.h"

#include "base/bytes.h"

namespace torch_ckpt {

std::string to_string(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.offsets.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(box.offsets[d]) + ":" + std::to_string(box.offsets[d] + box.sizes[d]);
  }
  return text + "]";
}

bool lies_within(const Box& box, const Dims& sizes) {
  if (box.offsets.size() != sizes.size() || box.sizes.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!range_within(box.offsets[d], box.sizes[d], sizes[d])) return false;
  }
  return true;
}

}  // namespace torch_ckpt
