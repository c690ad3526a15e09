#include "engine/load/planned_reads.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_ckpt {
namespace {

// Returns for each tensor whether its byte range overlaps that of another tensor.
std::vector<bool> shared_memory(const TensorBatch& batch) {
  struct Extent {
    const std::byte* begin;
    const std::byte* end;
    size_t item;
  };
  std::vector<Extent> extents;
  for (size_t item = 0; item < batch.views.size(); ++item) {
    const TensorView& view = batch.views[item];
    if (view.data == nullptr || checked_volume(view.sizes) == 0) continue;
    int64_t nbytes = itemsize(view.dtype);
    for (size_t d = 0; d < view.sizes.size(); ++d) {
      nbytes += (view.sizes[d] - 1) * view.strides[d];
    }
    extents.push_back({view.data, view.data + nbytes, item});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  std::vector<bool> out(batch.views.size());
  for (size_t i = 1, last = 0; i < extents.size(); ++i) {
    if (extents[i].begin < extents[last].end) {
      out[extents[i].item] = out[extents[last].item] = true;
    }
    if (extents[i].end > extents[last].end) last = i;  // The extent with the greatest end.
  }
  return out;
}

// Returns the box of a tensor that a read writes to.
LiveTensor narrowed(LiveTensor live, const PlannedRead& read) {
  for (size_t d = 0; d < read.lengths.size(); ++d) {
    live.data += read.dest_offsets[d] * live.strides[d];
    live.sizes[d] = read.lengths[d];
  }
  return live;
}

}  // namespace

Result<PlannedReads> PlannedReads::make(std::shared_ptr<const StoredIndex> index,
                                        std::shared_ptr<const ItemTable> items, bool partial) {
  ASSIGN_OR_RETURN(ReadPlan plan, ReadPlan::make(*index, *items, partial));
  return PlannedReads(std::move(index), std::move(items), std::move(plan));
}

int64_t PlannedReads::nbytes() const {
  int64_t sum = 0;
  for (const PlannedRead& read : plan_.reads()) sum += read.place.nbytes;
  return sum;
}

std::vector<StoredSlice> PlannedReads::slices() const {
  std::vector<StoredSlice> out;
  out.reserve(plan_.reads().size());
  for (const PlannedRead& read : plan_.reads()) out.push_back(slice(read));
  return out;
}

std::vector<TensorRequest> PlannedReads::requests(const LoadJob& job) const {
  std::vector<TensorRequest> out;
  for (const PlannedRead& read : plan_.reads()) {
    const std::optional<DType> dtype = given(job, read, std::nullopt);
    if (dtype) out.push_back(without_memory(read, *dtype));
  }
  return out;
}

Result<PlannedReads::Requests> PlannedReads::requests(const LoadJob& job, const TensorBatch& batch,
                                                      const ToLive& to_live) const {
  if (static_cast<int64_t>(batch.views.size()) != items().size()) {
    return invalid_argument(batch.views.size(), " tensors for ", items().size(), " items");
  }
  Requests out;
  const std::vector<bool> is_shared = shared_memory(batch);
  for (int64_t i = 0; i < size(); ++i) {
    const PlannedRead& read = at(i);
    const auto item = static_cast<size_t>(read.item);
    const TensorView& view = batch.views[item];
    const std::optional<DType> dtype = given(job, read, view.dtype);
    if (!dtype || batch.kinds[item] == TensorKind::kTorchOnly || is_shared[item] ||
        view.sizes != to_dims(items().box(read.item).sizes)) {
      out.left.push_back(i);
      continue;
    }
    const bool is_plain = batch.kinds[item] == TensorKind::kPlain && view.writable;
    out.numbers.push_back(i);
    if (is_plain && view.dtype == *dtype) {
      out.requests.push_back({slice(read),
                              {read.storage_offsets, read.lengths},
                              narrowed(to_live(view, items().fqn(read.item)), read)});
    } else {
      out.requests.push_back(without_memory(read, *dtype));
    }
  }
  return out;
}

void PlannedReads::sort(std::vector<int64_t>* numbers) const {
  if (numbers->empty()) return;
  std::unordered_map<int64_t, size_t> order;  // File -> its position among the reads.
  for (const PlannedRead& read : plan_.reads()) order.try_emplace(read.place.file, order.size());
  const auto key = [&](int64_t number) {
    return std::pair(order.at(at(number).place.file), number);
  };
  std::sort(numbers->begin(), numbers->end(),
            [&](int64_t a, int64_t b) { return key(a) < key(b); });
}

std::optional<DType> PlannedReads::given(const LoadJob& job, const PlannedRead& read,
                                         std::optional<DType> target) const {
  if (read.is_object || read.is_transformed) return std::nullopt;
  const std::optional<DType> stored = dtype_from_name(plan_.stored_dtype(read.item));
  if (!stored) return std::nullopt;
  return job.given(std::string(items().fqn(read.item)), *stored, target);
}

StoredSlice PlannedReads::slice(const PlannedRead& read) const {
  return {plan_.file(read.place.file), read.place.offset, read.place.nbytes,
          std::string(items().fqn(read.item))};
}

TensorRequest PlannedReads::without_memory(const PlannedRead& read, DType dtype) const {
  LiveTensor live;
  live.dtype = dtype;
  live.sizes = read.lengths;
  live.strides = contiguous_strides(read.lengths);
  for (int64_t& stride : live.strides) stride *= itemsize(dtype);
  return {slice(read), {read.storage_offsets, read.lengths}, std::move(live)};
}

}  // namespace torch_ckpt
