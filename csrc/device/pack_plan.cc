#include "device/pack_plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

namespace torch_ckpt {
namespace {

// Windows are not cut for gaps shorter than this: copying them costs less than another launch.
constexpr int64_t kMostGapNbytes = int64_t{64} << 10;

// What starting on a chunk costs a warp, in units that it could have moved meanwhile.
constexpr int64_t kChunkCost = 64;
// Below this a warp is not worth having.
constexpr int64_t kLeastWorkerCost = 512 + kChunkCost;

// Divisor needs numbers below 2^31.
constexpr int64_t kMostUnits = int64_t{1} << 30;

constexpr int64_t kWidest = 16;

// A dimension of a copy; strides in bytes.
struct Dim {
  int64_t size;
  int64_t tensor_stride;
  int64_t staging_stride;
};

// A copy in as few dimensions as it has, the outermost first; the last is of single bytes.
struct ByteCopy {
  std::byte* tensor = nullptr;
  int64_t begin = 0;  // Bytes [begin, end) of the staging buffer, gaps included.
  int64_t end = 0;
  std::vector<Dim> dims;
};

Divisor divisor(int64_t value) {
  uint32_t shift = 0;
  while ((int64_t{1} << shift) < value) ++shift;
  const uint64_t power = uint64_t{1} << shift;
  const auto by = static_cast<uint64_t>(value);
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(((power - by) << 32) / by + 1),
          shift};
}

// The largest power of two that divides all numbers whose bits are in `bits`.
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

// The bytes from the first to the last of a copy's staging side; nothing where elements are not
// one behind the other or numbers do not fit. Requires: dims by falling staging strides.
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
        return invalid_argument("two copies meet at ", copy.begin, " of the staging buffer");
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

  // A region whose unit 0 is at these places. Its shape and count are the caller's to set.
  PackChunk region_at(std::byte* tensor, int64_t staging, int64_t width) const {
    const auto address = static_cast<int64_t>(bits_of(tensor));
    return {.src = packs() ? address : staging,
            .dst = packs() ? staging : address,
            .width = static_cast<uint32_t>(width)};
  }

  // Where the unit that is `i` units behind the chunk's first lies in the staging buffer.
  int64_t staging_offset(const PackChunk& chunk, int64_t i) const {
    const auto unit = static_cast<uint32_t>(chunk.first + i);
    const UnitOffsets offsets = unit_offsets(chunk, plan_.shapes.data(), unit);
    return packs() ? chunk.dst + offsets.dst : chunk.src + offsets.src;
  }

  const PackOptions options_;
  PackPlan plan_;
  std::map<std::vector<int64_t>, int32_t> shape_numbers_;
  PackWindow window_;             // The one being filled,
  std::vector<PackChunk> parts_;  // and what is in it; none: there is no such window.
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

// Wide units, and bytes before the first and behind the last address that they can have.
Status Planner::put_contiguous(const ByteCopy& copy) {
  const int64_t nbytes = copy.end - copy.begin;
  if (nbytes >= options_.direct_nbytes) {
    if (packs()) close_window();  // One that went on behind it would be copied over it.
    plan_.direct.push_back({copy.tensor, copy.begin, nbytes});
    return ok_status();
  }
  const int64_t width = widest_unit(bits_of(copy.tensor) ^ bits_of(copy.begin));
  const int64_t head = std::min(nbytes, align_up(copy.begin, width) - copy.begin);
  const int64_t body = align_down(nbytes - head, width);
  const auto put = [&](int64_t at, int64_t part, int64_t unit) {
    if (part == 0) return ok_status();
    PackChunk region = region_at(copy.tensor + at, copy.begin + at, unit);
    region.count = static_cast<uint32_t>(part / unit);
    return put_region(region);
  };
  RETURN_IF_ERROR(put(0, head, 1));
  RETURN_IF_ERROR(put(head, body, width));
  return put(head + body, nbytes - head - body, 1);
}

// Units as wide as every row and every step allow.
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
    const int64_t part = too_many_dims ? 1 : (outer.size + 1) / 2;
    for (int64_t i = 0; i < outer.size; i += part) {
      std::vector<Dim> inner = dims;
      inner.front().size = std::min(part, outer.size - i);
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

// Cuts a region where windows end. Offsets in the staging buffer rise from unit to unit.
Status Planner::put_region(PackChunk region) {
  const auto end_of = [&](int64_t count) {
    return staging_offset(region, count - 1) + int64_t{region.width};
  };
  while (region.count > 0) {
    const int64_t begin = staging_offset(region, 0);
    // A later copy may begin before the end of an earlier one, where that has gaps.
    if (!parts_.empty() &&
        (begin < window_.begin || begin > window_.end + kMostGapNbytes ||
         begin + int64_t{region.width} > window_.base() + options_.window_nbytes)) {
      close_window();
    }
    if (parts_.empty()) window_.begin = window_.end = begin;
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
    parts_.push_back(region);
    parts_.back().count = static_cast<uint32_t>(fits);
    region.first += static_cast<uint32_t>(fits);
    region.count -= static_cast<uint32_t>(fits);
  }
  return ok_status();
}

// Shares what is in the window out to workers.
void Planner::close_window() {
  if (parts_.empty()) return;
  int64_t cost = 0;
  for (const PackChunk& part : parts_) cost += int64_t{part.count} + kChunkCost;
  const int64_t share = std::max(kLeastWorkerCost, cost / options_.workers + 1);
  const auto worker_count = [&] { return static_cast<int32_t>(plan_.first_chunk.size()) - 1; };
  window_.first_worker = worker_count();
  plan_.first_chunk.pop_back();  // Where this window's chunks begin: its first worker says so.
  int64_t left = 0;
  for (PackChunk& part : parts_) {
    while (part.count > 0) {
      if (left <= kChunkCost) {
        plan_.first_chunk.push_back(static_cast<int32_t>(plan_.chunks.size()));
        left = share;
      }
      // Cut so that no warp has lanes without work in the middle of a region.
      const int64_t most = align_up(left - kChunkCost, int64_t{kLanes});
      const auto count = static_cast<uint32_t>(std::min(int64_t{part.count}, most));
      plan_.chunks.push_back(part);
      plan_.chunks.back().count = count;
      part.first += count;
      part.count -= count;
      left -= int64_t{count} + kChunkCost;
    }
  }
  plan_.first_chunk.push_back(static_cast<int32_t>(plan_.chunks.size()));
  window_.worker_end = worker_count();
  plan_.window_nbytes = std::max(plan_.window_nbytes, window_.end - window_.base());
  plan_.windows.push_back(window_);
  parts_.clear();
}

}  // namespace

PackBases PackPlan::bases(const PackWindow& window, const std::byte* memory) const {
  const uint64_t base = bits_of(memory) - bits_of(window.base());
  return direction == PackDirection::kPack ? PackBases{0, base} : PackBases{base, 0};
}

Result<PackPlan> plan_pack(PackDirection direction, std::span<const TensorCopy> copies,
                           const PackOptions& options) {
  return Planner(direction, options).plan(copies);
}

}  // namespace torch_ckpt
