#include "device/pack_plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

namespace torch_ckpt {
namespace {

// Shorter gaps do not end a window: copying a gap costs less than another launch.
constexpr int64_t kMostGapNbytes = int64_t{64} << 10;

// Cost of starting a chunk, in units that a warp could move in the same time.
constexpr int64_t kChunkCost = 64;
// Minimum work per warp.
constexpr int64_t kLeastWorkerCost = 512 + kChunkCost;

// Divisor needs numbers below 2^31.
constexpr int64_t kMostUnits = int64_t{1} << 30;

constexpr int64_t kWidest = 16;

// A dimension of a copy. Strides are in bytes.
struct Dim {
  int64_t size;
  int64_t tensor_stride;
  int64_t staging_stride;
};

// A copy with merged dimensions, outermost first. The last dimension counts single bytes.
struct ByteCopy {
  std::byte* tensor = nullptr;
  int64_t begin = 0;  // Range [begin, end) in the staging buffer, including gaps.
  int64_t end = 0;
  std::vector<Dim> dims;
};

// Returns the largest power of two, at most kWidest, that divides all numbers in `bits`, their
// bitwise OR.
int64_t widest_unit(uint64_t bits) {
  bits |= kWidest;
  return static_cast<int64_t>(bits & (~bits + 1));
}

uint64_t bits_of(int64_t number) { return static_cast<uint64_t>(number); }
uint64_t bits_of(const std::byte* address) { return reinterpret_cast<uint64_t>(address); }

std::vector<Dim> merged(const std::vector<Dim>& dims) {
  std::vector<Dim> out;
  for (const Dim& dim : dims) {
    if (!out.empty() && out.back().tensor_stride == dim.size * dim.tensor_stride &&
        out.back().staging_stride == dim.size * dim.staging_stride) {
      out.back() = {out.back().size * dim.size, dim.tensor_stride, dim.staging_stride};
    } else {
      out.push_back(dim);
    }
  }
  return out;
}

// Returns the extent of a copy in the staging buffer, from its first to its last byte. Returns
// nullopt if elements overlap or the extent overflows.
// Requires: `dims` are in descending order of staging strides.
std::optional<int64_t> staging_extent(const std::vector<Dim>& dims) {
  int64_t extent = 1;
  for (size_t d = dims.size(); d-- > 0;) {
    if (dims[d].staging_stride < extent) return std::nullopt;
    const auto rows = checked_mul(dims[d].size - 1, dims[d].staging_stride);
    const auto sum = rows ? checked_add(*rows, extent) : std::nullopt;
    if (!sum) return std::nullopt;
    extent = *sum;
  }
  return extent;
}

class Planner {
 public:
  Planner(PackDirection direction, const PackOptions& options) : options_(options) {
    plan_.direction = direction;
    plan_.staging_nbytes = options.staging_nbytes;
  }

  Result<PackPlan> plan(std::span<const TensorCopy> copies) {
    std::vector<ByteCopy> found;
    found.reserve(copies.size());
    for (size_t i = 0; i < copies.size(); ++i) {
      const Status status = add_copy(copies[i], found);
      if (!status.ok()) return invalid_argument("copy ", i, " of ", status.message());
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const ByteCopy& a, const ByteCopy& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const ByteCopy& copy : found) {
      if (plan_.direction == PackDirection::kPack && copy.begin < end) {
        return invalid_argument("two copies overlap at ", copy.begin, " of the staging buffer");
      }
      end = std::max(end, copy.end);
      RETURN_IF_ERROR(copy.dims.size() == 1 ? put_contiguous(copy) : put_strided(copy));
    }
    close_window();
    return std::move(plan_);
  }

 private:
  Status add_copy(const TensorCopy& from, std::vector<ByteCopy>& out) const;
  Status put_contiguous(const ByteCopy& copy);
  Status put_strided(const ByteCopy& copy);
  Status put_units(const std::vector<Dim>& dims, std::byte* tensor, int64_t staging, int64_t width);
  Status put_region(PackChunk region);
  int32_t shape_of(const std::vector<Dim>& dims);
  void close_window();

  bool packs() const { return plan_.direction == PackDirection::kPack; }

  // Returns a region with unit 0 at these places. The caller sets shape and count.
  PackChunk region_at(std::byte* tensor, int64_t staging, int64_t width) const {
    const auto address = static_cast<int64_t>(bits_of(tensor));
    return {.src = packs() ? address : staging,
            .dst = packs() ? staging : address,
            .width = static_cast<uint32_t>(width)};
  }

  // Returns the staging offset of the unit `i` units after the chunk's first unit.
  int64_t staging_offset(const PackChunk& chunk, int64_t i) const {
    const auto unit = static_cast<uint32_t>(chunk.first + i);
    const UnitOffsets offsets = unit_offsets(chunk, plan_.shapes.data(), unit);
    return packs() ? chunk.dst + offsets.dst : chunk.src + offsets.src;
  }

  const PackOptions options_;
  PackPlan plan_;
  std::map<std::vector<int64_t>, int32_t> shape_numbers_;
  PackWindow window_;               // The open window.
  std::vector<PackChunk> regions_;  // Regions in the open window; if empty, no window is open.
};

Status Planner::add_copy(const TensorCopy& from, std::vector<ByteCopy>& out) const {
  const StridedCopy& copy = from.copy;
  const size_t ndim = copy.sizes.size();
  const auto numel = checked_numel(copy.sizes);
  if (copy.itemsize < 1 || !numel || !checked_mul(*numel, copy.itemsize) ||
      copy.src_strides.size() != ndim || copy.dst_strides.size() != ndim) {
    return invalid_argument(to_string(copy.sizes), " is no copy");
  }
  if (*numel == 0) return ok_status();
  const Dims& tensor_strides = packs() ? copy.src_strides : copy.dst_strides;
  const Dims& staging_strides = packs() ? copy.dst_strides : copy.src_strides;
  ByteCopy bytes;
  for (size_t d = 0; d < ndim; ++d) {
    if (copy.sizes[d] == 1) continue;
    bytes.dims.push_back({copy.sizes[d], tensor_strides[d], staging_strides[d]});
  }
  std::stable_sort(bytes.dims.begin(), bytes.dims.end(),
                   [](const Dim& a, const Dim& b) { return a.staging_stride > b.staging_stride; });
  bytes.dims.push_back({copy.itemsize, 1, 1});
  const auto extent = staging_extent(bytes.dims);
  bytes.begin = packs() ? copy.dst_offset : copy.src_offset;
  if (!extent || !range_within(bytes.begin, *extent, options_.staging_nbytes)) {
    return invalid_argument(to_string(copy.sizes), " with strides ", to_string(staging_strides),
                            " has no place at ", bytes.begin, " of a staging buffer of ",
                            options_.staging_nbytes, " bytes");
  }
  bytes.tensor = from.tensor + (packs() ? copy.src_offset : copy.dst_offset);
  bytes.end = bytes.begin + *extent;
  bytes.dims = merged(bytes.dims);
  out.push_back(std::move(bytes));
  return ok_status();
}

// Uses wide units between the first and the last aligned address, and single bytes outside.
Status Planner::put_contiguous(const ByteCopy& copy) {
  const int64_t nbytes = copy.end - copy.begin;
  if (nbytes >= options_.direct_nbytes) {
    if (packs()) close_window();  // A window that continued past this copy would overwrite it.
    plan_.direct.push_back({copy.tensor, copy.begin, nbytes});
    return ok_status();
  }
  const int64_t width = widest_unit(bits_of(copy.tensor) ^ bits_of(copy.begin));
  const int64_t head = std::min(nbytes, align_up(copy.begin, width) - copy.begin);
  const int64_t body = align_down(nbytes - head, width);
  const auto put = [&](int64_t at, int64_t length, int64_t unit) {
    if (length == 0) return ok_status();
    PackChunk region = region_at(copy.tensor + at, copy.begin + at, unit);
    region.count = static_cast<uint32_t>(length / unit);
    return put_region(region);
  };
  RETURN_IF_ERROR(put(0, head, 1));
  RETURN_IF_ERROR(put(head, body, width));
  return put(head + body, nbytes - head - body, 1);
}

// Uses the widest units that all rows and strides allow.
Status Planner::put_strided(const ByteCopy& copy) {
  std::vector<Dim> dims = copy.dims;
  Dim& run = dims.back();
  uint64_t bits = bits_of(copy.tensor) | bits_of(copy.begin) | bits_of(run.size);
  for (size_t d = 0; d + 1 < dims.size(); ++d) {
    bits |= bits_of(dims[d].tensor_stride) | bits_of(dims[d].staging_stride);
  }
  const int64_t width = widest_unit(bits);
  run = {run.size / width, width, width};
  if (run.size == 1) dims.pop_back();
  return put_units(dims, copy.tensor, copy.begin, width);
}

Status Planner::put_units(const std::vector<Dim>& dims, std::byte* tensor, int64_t staging,
                          int64_t width) {
  int64_t units = 1;
  for (const Dim& dim : dims) units *= dim.size;
  const bool too_many_dims = dims.size() > size_t{kMaxPackDims};
  if (too_many_dims || units > kMostUnits) {
    const Dim& outer = dims.front();
    const int64_t step = too_many_dims ? 1 : (outer.size + 1) / 2;
    for (int64_t i = 0; i < outer.size; i += step) {
      std::vector<Dim> inner = dims;
      inner.front().size = std::min(step, outer.size - i);
      if (inner.front().size == 1) inner.erase(inner.begin());
      RETURN_IF_ERROR(put_units(inner, tensor + i * outer.tensor_stride,
                                staging + i * outer.staging_stride, width));
    }
    return ok_status();
  }
  PackChunk region = region_at(tensor, staging, width);
  region.count = static_cast<uint32_t>(units);
  const bool contiguous = dims.empty() || (dims.size() == 1 && dims[0].tensor_stride == width &&
                                           dims[0].staging_stride == width);
  if (!contiguous) region.shape = shape_of(dims);
  return put_region(region);
}

int32_t Planner::shape_of(const std::vector<Dim>& dims) {
  std::vector<int64_t> key;
  for (const Dim& dim : dims) {
    key.insert(key.end(), {dim.size, dim.tensor_stride, dim.staging_stride});
  }
  const auto next = static_cast<int32_t>(plan_.shapes.size());
  const auto [found, is_new] = shape_numbers_.emplace(std::move(key), next);
  if (!is_new) return found->second;
  PackShape shape;
  for (size_t d = dims.size(); d-- > 0;) {
    PackDim& out = shape.dims[shape.ndim++];
    out.src_stride = packs() ? dims[d].tensor_stride : dims[d].staging_stride;
    out.dst_stride = packs() ? dims[d].staging_stride : dims[d].tensor_stride;
    out.size = divisor(dims[d].size);
  }
  plan_.shapes.push_back(shape);
  return next;
}

// Cuts a region at window ends. Staging offsets ascend from unit to unit.
Status Planner::put_region(PackChunk region) {
  const auto end_of = [&](int64_t count) {
    return staging_offset(region, count - 1) + int64_t{region.width};
  };
  while (region.count > 0) {
    const int64_t begin = staging_offset(region, 0);
    // A later copy may begin inside the gaps of an earlier one.
    if (!regions_.empty() &&
        (begin < window_.begin || begin > window_.end + kMostGapNbytes ||
         begin + int64_t{region.width} > window_.base() + options_.window_nbytes)) {
      close_window();
    }
    if (regions_.empty()) window_.begin = window_.end = begin;
    const int64_t limit = window_.base() + options_.window_nbytes;
    if (end_of(1) > limit) {
      return invalid_argument("a window of ", options_.window_nbytes, " bytes is too small");
    }
    int64_t fits = region.count;
    if (end_of(fits) > limit) {
      int64_t too_many = fits;
      for (fits = 1; too_many - fits > 1;) {
        const int64_t middle = (fits + too_many) / 2;
        (end_of(middle) > limit ? too_many : fits) = middle;
      }
    }
    window_.end = std::max(window_.end, end_of(fits));
    regions_.push_back(region);
    regions_.back().count = static_cast<uint32_t>(fits);
    region.first += static_cast<uint32_t>(fits);
    region.count -= static_cast<uint32_t>(fits);
  }
  return ok_status();
}

// Distributes the regions of the open window over workers, and closes the window.
void Planner::close_window() {
  if (regions_.empty()) return;
  int64_t cost = 0;
  for (const PackChunk& region : regions_) cost += int64_t{region.count} + kChunkCost;
  const int64_t share = std::max(kLeastWorkerCost, cost / options_.workers + 1);
  const auto worker_count = [&] { return static_cast<int32_t>(plan_.first_chunk.size()) - 1; };
  window_.first_worker = worker_count();
  // Drop the end marker: the first worker of this window adds the same value.
  plan_.first_chunk.pop_back();
  int64_t left = 0;
  for (PackChunk& region : regions_) {
    while (region.count > 0) {
      if (left <= kChunkCost) {
        plan_.first_chunk.push_back(static_cast<int32_t>(plan_.chunks.size()));
        left = share;
      }
      // Whole warps of units: no lane idles in the middle of a region.
      const int64_t max_units = align_up(left - kChunkCost, int64_t{kLanes});
      const auto count = static_cast<uint32_t>(std::min(int64_t{region.count}, max_units));
      plan_.chunks.push_back(region);
      plan_.chunks.back().count = count;
      region.first += count;
      region.count -= count;
      left -= int64_t{count} + kChunkCost;
    }
  }
  plan_.first_chunk.push_back(static_cast<int32_t>(plan_.chunks.size()));
  window_.worker_end = worker_count();
  plan_.window_nbytes = std::max(plan_.window_nbytes, window_.end - window_.base());
  plan_.windows.push_back(window_);
  regions_.clear();
}

}  // namespace

Divisor divisor(int64_t value) {
  uint32_t shift = 0;
  while ((int64_t{1} << shift) < value) ++shift;
  const uint64_t power = uint64_t{1} << shift;
  const auto by = static_cast<uint64_t>(value);
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(((power - by) << 32) / by + 1),
          shift};
}

PackBases PackPlan::bases(const PackWindow& window, const std::byte* memory) const {
  const uint64_t base = bits_of(memory) - bits_of(window.base());
  return direction == PackDirection::kPack ? PackBases{0, base} : PackBases{base, 0};
}

Result<PackPlan> plan_pack(PackDirection direction, std::span<const TensorCopy> copies,
                           const PackOptions& options) {
  return Planner(direction, options).plan(copies);
}

}  // namespace torch_ckpt
