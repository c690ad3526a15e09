#include "geometry/overlap.h"

#include <algorithm>
#include <numeric>

namespace torch_ckpt {
namespace {

// Reorders the dimensions so that source strides descend. Splitting the outermost dimension then
// splits the source range. Elements may be copied in any order.
StridedCopy ordered_by_source(const StridedCopy& copy) {
  std::vector<size_t> order(copy.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return copy.src_strides[a] > copy.src_strides[b]; });
  StridedCopy out = copy;
  for (size_t d = 0; d < order.size(); ++d) {
    out.sizes[d] = copy.sizes[order[d]];
    out.src_strides[d] = copy.src_strides[order[d]];
    out.dst_strides[d] = copy.dst_strides[order[d]];
  }
  return out;
}

// Narrows dimension `dim` of a copy to the indices [begin, end).
StridedCopy narrowed(const StridedCopy& copy, size_t dim, int64_t begin, int64_t end) {
  StridedCopy out = copy;
  out.sizes[dim] = end - begin;
  out.src_offset += begin * copy.src_strides[dim];
  out.dst_offset += begin * copy.dst_strides[dim];
  return out;
}

// Returns the source extent of dimensions `dim` and inwards, in bytes.
int64_t inner_extent(const StridedCopy& copy, size_t dim) {
  int64_t extent = copy.itemsize;
  for (size_t d = dim; d < copy.sizes.size(); ++d) {
    extent += (copy.sizes[d] - 1) * copy.src_strides[d];
  }
  return extent;
}

// Returns the longest source gap inside dimensions `dim` and inwards, in bytes.
int64_t largest_gap(const StridedCopy& copy, size_t dim) {
  int64_t gap = 0;
  for (size_t d = dim; d < copy.sizes.size(); ++d) {
    if (copy.sizes[d] > 1) gap = std::max(gap, copy.src_strides[d] - inner_extent(copy, d + 1));
  }
  return gap;
}

void append_split(const StridedCopy& copy, size_t dim, int64_t max_nbytes, int64_t max_gap,
                  std::vector<StridedCopy>& out) {
  while (dim < copy.sizes.size() && copy.sizes[dim] == 1) ++dim;
  if (dim == copy.sizes.size()) {
    out.push_back(copy);
    return;
  }

  // A row is the sub-copy of one index of `dim`. Rows stay together while their gaps and their
  // total length allow.
  const int64_t row = inner_extent(copy, dim + 1);
  const int64_t stride = copy.src_strides[dim];
  const bool row_is_dense = largest_gap(copy, dim + 1) <= max_gap;
  const bool rows_are_close = stride - row <= std::min(max_gap, std::max(row, kSmallGap));
  int64_t rows_together = 1;
  if (row_is_dense && row <= max_nbytes && rows_are_close) {
    rows_together = stride == 0 ? copy.sizes[dim] : 1 + (max_nbytes - row) / stride;
  }

  for (int64_t begin = 0; begin < copy.sizes[dim];) {
    const int64_t end = std::min(copy.sizes[dim], begin + rows_together);
    const StridedCopy rows = narrowed(copy, dim, begin, end);
    if (end - begin == 1 && (row > max_nbytes || !row_is_dense)) {
      append_split(rows, dim + 1, max_nbytes, max_gap, out);
    } else {
      out.push_back(rows);
    }
    begin = end;
  }
}

}  // namespace

StridedCopy copy_of_box(const Box& box, int64_t itemsize, int64_t src_offset,
                        const Dims& src_strides, const Dims& dst_strides) {
  StridedCopy copy;
  copy.itemsize = itemsize;
  copy.sizes = box.sizes;
  copy.src_offset = src_offset;
  // An empty box may begin at the end of the tensor, at an offset that may not fit an int64_t.
  const bool empty = checked_numel(box.sizes) == 0;
  for (size_t d = 0; d < box.offsets.size() && !empty; ++d) {
    copy.src_offset += box.offsets[d] * src_strides[d];
  }
  copy.src_strides = src_strides;
  copy.dst_strides = dst_strides;
  return copy;
}

ByteRange source_range(const StridedCopy& copy) {
  return {copy.src_offset, copy.src_offset + inner_extent(copy, 0)};
}

bool is_one_run(const StridedCopy& copy) {
  const StridedCopy simple = simplified(copy);
  return simple.sizes.empty() ||
         (simple.sizes.size() == 1 && simple.src_strides[0] == copy.itemsize &&
          simple.dst_strides[0] == copy.itemsize);
}

StridedCopy slice_run(const StridedCopy& run, const ByteRange& range) {
  const int64_t begin = range.begin - run.src_offset;
  return {.itemsize = run.itemsize,
          .sizes = {range.nbytes() / run.itemsize},
          .src_offset = range.begin,
          .src_strides = {run.itemsize},
          .dst_offset = run.dst_offset + begin,
          .dst_strides = {run.itemsize}};
}

std::vector<StridedCopy> split_by_source(const StridedCopy& copy, int64_t max_nbytes,
                                         int64_t max_gap) {
  std::vector<StridedCopy> out;
  if (std::find(copy.sizes.begin(), copy.sizes.end(), 0) != copy.sizes.end()) return out;
  append_split(simplified(ordered_by_source(copy)), 0, max_nbytes, max_gap, out);
  return out;
}

}  // namespace torch_ckpt
