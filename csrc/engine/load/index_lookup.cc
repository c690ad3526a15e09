#include "engine/load/index_lookup.h"

#include <algorithm>

#include "base/dtype.h"
#include "base/strided.h"

namespace torch_ckpt {
namespace {

// Returns a tensor of a foreign index, whose elements lie in the extent without a frame.
Result<StoredTensor> tensor_without_frame(const StoredSlice& slice, DType dtype,
                                          const IndexedBox& box,
                                          const std::optional<IndexedView>& view) {
  StoredTensor stored;
  stored.dtype = dtype;
  stored.sizes = box.sizes;
  if (view) {
    stored.strides = view->strides;
  } else {
    // If one size is 0, the others may be so large that contiguous_strides would overflow.
    const bool is_empty = checked_numel(box.sizes) == 0;
    stored.strides = is_empty ? Dims(box.sizes.size()) : contiguous_strides(box.sizes);
  }
  stored.storage_offset = view ? view->storage_offset : 0;
  stored.payload_nbytes = slice.nbytes;
  stored.payload_crc = view ? view->crc : 0;
  const Status placed = check_elements(stored);
  if (!placed.ok()) return with_slice(placed, slice);
  return stored;
}

}  // namespace

Result<std::unique_ptr<const FileSums>> IndexLookup::sums(const StoredSlice& slice) const {
  ASSIGN_OR_RETURN(const auto number, index_->find_file(slice.file));
  if (!number) {
    return corruption("cannot read ", describe(slice), ": the index lacks the file");
  }
  ASSIGN_OR_RETURN(StoredFile file, index_->file(*number));
  return std::make_unique<const FileSums>(index_, std::move(file));
}

Status IndexLookup::load_entry(const StoredSlice& slice) {
  if (slice.file != file_name_ || file_ < 0) {
    ASSIGN_OR_RETURN(const auto file, index_->find_file(slice.file));
    file_name_ = slice.file;
    file_ = file.value_or(-1);
  }
  if (cached_ && cached_->fqn == slice.name) {
    if (!cached_->sorted) std::sort(cached_->boxes.begin(), cached_->boxes.end());
    cached_->sorted = true;
    return ok_status();
  }
  cached_.reset();
  ASSIGN_OR_RETURN(const auto number, index_->find_entry(slice.name));
  if (!number) return ok_status();
  CachedEntry cached{.fqn = slice.name, .entry = {}, .boxes = {}};
  ASSIGN_OR_RETURN(cached.entry, index_->entry(*number));
  ASSIGN_OR_RETURN(const std::vector<StoredPlace> places, index_->places(cached.entry));
  for (const StoredPlace& place : places) {
    cached.boxes.emplace_back(place, std::ssize(cached.boxes));
  }
  cached_ = std::move(cached);
  return ok_status();
}

std::optional<int64_t> IndexLookup::find_box(const StoredPlace& place) {
  const auto& boxes = cached_->boxes;
  const std::pair<StoredPlace, int64_t> first(place, 0);
  const auto found =
      cached_->sorted
          ? std::lower_bound(boxes.begin(), boxes.end(), first)
          : std::ranges::find_if(boxes, [&](const auto& box) { return box.first == place; });
  if (found == boxes.end() || found->first != place) return std::nullopt;
  return found->second;
}

Result<std::optional<StoredTensor>> IndexLookup::tensor(const StoredSlice& slice) {
  RETURN_IF_ERROR(load_entry(slice));
  std::optional<int64_t> number;
  if (cached_ && cached_->entry.facts.is_tensor && file_ >= 0) {
    number = find_box({file_, slice.offset, slice.nbytes});
  }
  if (!number) {
    return corruption("cannot read ", describe(slice), ": the index has no such slice");
  }
  const StoredEntry& entry = cached_->entry;
  ASSIGN_OR_RETURN(const auto boxes, index_->boxes(entry, *number, *number + 1));
  const IndexedBox& box = boxes.front();
  const std::optional<DType> dtype = dtype_from_name(entry.facts.dtype);
  if (!box.plain || !dtype) return std::optional<StoredTensor>();
  if (index_->is_foreign()) {
    ASSIGN_OR_RETURN(StoredTensor stored,
                     tensor_without_frame(slice, *dtype, box, entry.facts.view));
    return std::optional(std::move(stored));
  }

  const Result<TensorFrame> frame = TensorFrame::make(*dtype, box.sizes);
  if (!frame.ok() || frame->nbytes() != slice.nbytes) {
    return corruption("cannot read ", describe(slice), ": its length is not that of a tensor of ",
                      entry.facts.dtype, " ", to_string(box.sizes));
  }
  StoredTensor stored;
  stored.dtype = *dtype;
  stored.sizes = box.sizes;
  stored.strides = contiguous_strides(box.sizes);
  stored.payload_offset = frame->head_nbytes();
  stored.payload_nbytes = frame->payload_nbytes();
  return std::optional(std::move(stored));
}

}  // namespace torch_ckpt
