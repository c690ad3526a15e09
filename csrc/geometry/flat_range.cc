#include "geometry/flat_range.h"

#include <algorithm>

namespace torch_ckpt {
namespace {

// Appends the elements [begin, end) of the sub-tensor at index `prefix` of the outer dimensions.
// The outermost dimension of the sub-tensor is prefix.size(). `rows[d]` is the number of elements
// per index of dimension d.
void append_boxes(const Dims& sizes, const Dims& rows, const Dims& prefix, int64_t begin,
                  int64_t end, std::vector<Box>& boxes) {
  if (begin == end) return;
  const size_t dim = prefix.size();
  if (dim == sizes.size()) {
    boxes.push_back({prefix, Dims(sizes.size(), 1)});
    return;
  }

  const int64_t row = rows[dim];
  const int64_t first_whole = (begin + row - 1) / row;
  const int64_t end_whole = end / row;

  if (first_whole > end_whole) {
    // The range begins and ends inside one index.
    Dims inner = prefix;
    inner.push_back(end_whole);
    append_boxes(sizes, rows, inner, begin - end_whole * row, end - end_whole * row, boxes);
    return;
  }
  if (begin < first_whole * row) {
    Dims inner = prefix;
    inner.push_back(first_whole - 1);
    append_boxes(sizes, rows, inner, begin - (first_whole - 1) * row, row, boxes);
  }
  if (first_whole < end_whole) {
    Box whole;
    whole.offsets = prefix;
    whole.offsets.push_back(first_whole);
    whole.offsets.resize(sizes.size(), 0);
    whole.sizes.assign(prefix.size(), 1);
    whole.sizes.push_back(end_whole - first_whole);
    whole.sizes.insert(whole.sizes.end(), sizes.begin() + static_cast<int64_t>(dim) + 1,
                       sizes.end());
    boxes.push_back(std::move(whole));
  }
  if (end_whole * row < end) {
    Dims inner = prefix;
    inner.push_back(end_whole);
    append_boxes(sizes, rows, inner, 0, end - end_whole * row, boxes);
  }
}

}  // namespace

std::vector<Box> flat_range_to_boxes(const Dims& sizes, int64_t begin, int64_t end) {
  std::vector<Box> boxes;
  append_boxes(sizes, contiguous_strides(sizes), {}, begin, end, boxes);
  return boxes;
}

}  // namespace torch_ckpt
