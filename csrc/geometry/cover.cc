#include "geometry/cover.h"

#include <algorithm>
#include <string>
#include <utility>

namespace torch_ckpt {
namespace {

bool is_empty(const Box& box) {
  return std::find(box.sizes.begin(), box.sizes.end(), 0) != box.sizes.end();
}

int64_t end_of(const Box& box, size_t d) { return box.offsets[d] + box.sizes[d]; }

// The number of elements modulo 2^64.
uint64_t volume(const Box& box) {
  uint64_t out = 1;
  for (const int64_t size : box.sizes) out *= static_cast<uint64_t>(size);
  return out;
}

// Narrows dimension `d` to the indices [begin, end). The result may be empty.
void narrow(Box* box, size_t d, int64_t begin, int64_t end) {
  const int64_t first = std::max(box->offsets[d], begin);
  box->sizes[d] = std::max(std::min(end_of(*box, d), end) - first, int64_t{0});
  box->offsets[d] = first;
}

// The boxes in a region, clipped to it. None is empty.
struct Part {
  Box region;
  std::vector<Box> boxes;

  // Returns whether the volumes of the boxes add up to that of the region. This proves nothing by
  // itself, since an overlap may compensate for a hole.
  bool adds_up() const {
    uint64_t sum = 0;
    for (const Box& box : boxes) sum += volume(box);
    return sum == volume(region);
  }
};

// Returns the bounds of boxes along a dimension that lie inside the region, ascending.
std::vector<int64_t> inner_bounds(const Part& part, size_t d) {
  std::vector<int64_t> out;
  for (const Box& box : part.boxes) {
    if (box.offsets[d] != part.region.offsets[d]) out.push_back(box.offsets[d]);
    if (end_of(box, d) != end_of(part.region, d)) out.push_back(end_of(box, d));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// Checks boxes that differ from the region in dimension `d` only.
std::optional<CoverFault> row_fault(Part part, size_t d) {
  std::sort(part.boxes.begin(), part.boxes.end(),
            [&](const Box& a, const Box& b) { return a.offsets[d] < b.offsets[d]; });
  int64_t end = part.region.offsets[d];
  const auto fault = [&](int64_t first, int64_t last, bool is_missing) {
    narrow(&part.region, d, first, last);
    return CoverFault{part.region, is_missing};
  };
  for (const Box& box : part.boxes) {
    if (box.offsets[d] > end) return fault(end, box.offsets[d], true);
    if (box.offsets[d] < end) return fault(box.offsets[d], std::min(end, end_of(box, d)), false);
    end = end_of(box, d);
  }
  if (end < end_of(part.region, d)) return fault(end, end_of(part.region, d), true);
  return std::nullopt;
}

std::pair<Part, Part> cut(Part part, size_t d, int64_t at) {
  Part lower{part.region, {}};
  Part upper{part.region, {}};
  narrow(&lower.region, d, lower.region.offsets[d], at);
  narrow(&upper.region, d, at, end_of(upper.region, d));
  for (Box& box : part.boxes) {
    if (box.offsets[d] < at && at < end_of(box, d)) {
      Box& first = lower.boxes.emplace_back(box);
      narrow(&first, d, first.offsets[d], at);
      narrow(&box, d, at, end_of(box, d));
    }
    (box.offsets[d] < at ? lower : upper).boxes.push_back(std::move(box));
  }
  return {std::move(lower), std::move(upper)};
}

std::optional<CoverFault> find_fault(Part part) {
  if (part.boxes.empty()) return CoverFault{part.region, true};
  size_t cut_dims = 0;  // Number of dimensions in which a box is not as long as the region.
  size_t best = 0;
  std::vector<int64_t> bounds;
  for (size_t d = 0; d < part.region.sizes.size(); ++d) {
    std::vector<int64_t> found = inner_bounds(part, d);
    if (found.empty()) continue;
    ++cut_dims;
    if (found.size() <= bounds.size()) continue;
    bounds = std::move(found);
    best = d;
  }
  if (cut_dims == 0) {
    if (part.boxes.size() == 1) return std::nullopt;
    return CoverFault{part.region, false};
  }
  if (cut_dims == 1) return row_fault(std::move(part), best);
  auto [lower, upper] = cut(std::move(part), best, bounds[bounds.size() / 2]);
  // A part whose volumes do not add up has a fault, so the other part need not be searched.
  if (!lower.adds_up()) return find_fault(std::move(lower));
  if (!upper.adds_up()) return find_fault(std::move(upper));
  const auto fault = find_fault(std::move(lower));
  return fault ? fault : find_fault(std::move(upper));
}

}  // namespace

std::optional<CoverFault> cover_fault(const Box& wanted, std::vector<Box> boxes) {
  if (is_empty(wanted)) return std::nullopt;
  for (Box& box : boxes) {
    for (size_t d = 0; d < wanted.sizes.size(); ++d) {
      narrow(&box, d, wanted.offsets[d], end_of(wanted, d));
    }
  }
  std::erase_if(boxes, is_empty);
  return find_fault({wanted, std::move(boxes)});
}

Status check_cover(std::string_view fqn, const Box& wanted, std::vector<Box> stored) {
  const std::optional<CoverFault> fault = cover_fault(wanted, std::move(stored));
  if (!fault) return ok_status();
  const std::string where = str_cat("cannot load ", to_string(wanted), " of '", fqn, "': ");
  if (fault->is_missing) {
    return mismatch(where, "no stored box contains ", to_string(fault->at));
  }
  return corruption(where, "different stored boxes contain ", to_string(fault->at));
}

}  // namespace torch_ckpt
