#include "engine/index_lookup.h"

#include "base/dtype.h"
#include "base/strided.h"

namespace torch_ckpt {

IndexLookup::IndexLookup(std::shared_ptr<const Index> index) : index_(std::move(index)) {
  for (const IndexedFile& file : index_->files) files_.emplace(file.name, &file);
  for (const IndexedEntry& entry : index_->entries) {
    if (!entry.is_tensor) continue;
    for (const IndexedBox& box : entry.boxes) {
      const IndexedFile* file = &index_->files[static_cast<size_t>(box.file)];
      places_.emplace(std::pair(file, box.offset), Place{&entry, &box});
    }
  }
}

const BlockSums* IndexLookup::sums(const std::string& file) const {
  const auto found = files_.find(file);
  return found == files_.end() ? nullptr : &found->second->sums;
}

Result<std::optional<StoredTensor>> IndexLookup::tensor(const StoredSlice& slice) const {
  const auto file = files_.find(slice.file);
  const auto found =
      file == files_.end() ? places_.end() : places_.find(std::pair(file->second, slice.offset));
  if (found == places_.end() || found->second.box->nbytes != slice.nbytes) {
    return corruption("cannot read ", describe(slice), ": the index has no such slice");
  }
  const auto& [entry, box] = found->second;
  const std::optional<DType> dtype = dtype_from_name(entry->dtype);
  if (!box->plain || !dtype) return std::optional<StoredTensor>();

  const Result<TensorFrame> frame = TensorFrame::make(*dtype, box->sizes);
  if (!frame.ok() || frame->nbytes() != slice.nbytes) {
    return corruption("cannot read ", describe(slice), ": it has not the length of a tensor of ",
                      entry->dtype, " ", to_string(box->sizes));
  }
  StoredTensor stored;
  stored.dtype = *dtype;
  stored.sizes = box->sizes;
  stored.strides = contiguous_strides(box->sizes);
  stored.payload_offset = frame->head_nbytes();
  stored.payload_nbytes = frame->payload_nbytes();
  return std::optional(std::move(stored));
}

}  // namespace torch_ckpt
