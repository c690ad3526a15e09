#include "engine/save/planned_file.h"

#include "engine/live_tensor.h"
#include "plan/item_extents.h"

namespace torch_ckpt {

void cut_to_rows(const Work::Item& item, TensorView& view) {
  if (item.rows < 0) return;
  if (view.data != nullptr) view.data += item.first_row * view.strides[0];
  view.sizes[0] = item.rows;
}

Result<PlannedFile> PlannedFile::make(Work work, const TensorBatch& batch) {
  PlannedFile file(std::move(work));
  if (static_cast<int64_t>(batch.views.size()) != file.work_.size()) {
    return invalid_argument(batch.views.size(), " tensors for ", file.work_.size(), " items");
  }
  std::vector<SliceNbytes> slices;
  for (int64_t at = 0; at < file.work_.size(); ++at) {
    const TensorKind kind = batch.kinds[static_cast<size_t>(at)];
    if (kind == TensorKind::kTorchOnly) {
      file.own_.push_back(at);
      continue;
    }
    ASSIGN_OR_RETURN(TensorView view, file.whole(at));
    if (kind == TensorKind::kNeedsCopy) {
      file.copied_.push_back(file.laid_out());
    } else {
      const TensorView& found = batch.views[static_cast<size_t>(at)];
      RETURN_IF_ERROR(file.check(at, found, view));
      view = found;
    }
    cut_to_rows(file.work_.at(at), view);
    ASSIGN_OR_RETURN(const SliceNbytes slice, slice_nbytes(view.dtype, view.sizes));
    file.positions_.push_back(at);
    file.views_.push_back(std::move(view));
    slices.push_back(slice);
  }
  file.layout_ = lay_out(slices);
  return file;
}

std::optional<std::pair<int64_t, int64_t>> PlannedFile::rows(int64_t number) const {
  const Work::Item& item = work_.at(position(number));
  if (item.rows < 0) return std::nullopt;
  return std::pair(item.first_row, item.rows);
}

Status PlannedFile::put(int64_t number, const TensorView& copy) {
  TensorView& view = views_[static_cast<size_t>(number)];
  RETURN_IF_ERROR(check(position(number), copy, view));
  view = copy;
  return ok_status();
}

void PlannedFile::add_digests(std::span<const uint64_t> samples,
                              const std::vector<int64_t>& positions) {
  std::vector<bool> is_chosen(samples.size());
  for (const int64_t position : positions) is_chosen[static_cast<size_t>(position)] = true;
  for (int64_t i = 0; i < laid_out(); ++i) {
    const auto at = static_cast<size_t>(position(i));
    digests_.push_back({layout_.slices[static_cast<size_t>(i)].offset, {samples[at], 0, 0}});
    is_digested_.push_back(is_chosen[at]);
  }
}

Status PlannedFile::write(SaveJob& job, int64_t begin, int64_t end) {
  Status status;
  for (int64_t i = begin; i < end && status.ok(); ++i) {
    const TensorView& view = views_[static_cast<size_t>(i)];
    LiveTensor live = to_live(view);
    live.name = work_.items().fqn(work_.at(position(i)).number);
    if (live.data == nullptr && checked_volume(view.sizes) != 0) {
      status = internal_error("cannot write '", live.name, "': it has no memory");
      break;
    }
    const auto at = static_cast<size_t>(i);
    if (digests_.empty() || !is_digested_[at]) {
      status = job.write(i, live);
      continue;
    }
    Digest128 digest;
    status = job.write(i, live, &digest);
    digests_[at].digest.low = digest.low;
    digests_[at].digest.high = digest.high;
  }
  const Status settled = job.settle();
  return status.ok() ? settled : status;
}

void PlannedFile::release(int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) views_[static_cast<size_t>(i)].storage.reset();
}

std::vector<std::byte> PlannedFile::extents(
    const std::vector<std::tuple<int64_t, int64_t, int64_t>>& appended) const {
  std::vector<ItemExtent> out;
  out.reserve(views_.size() + appended.size());
  for (int64_t i = 0; i < laid_out(); ++i) {
    const Slice& slice = layout_.slices[static_cast<size_t>(i)];
    out.push_back({work_.at(position(i)).number, slice.offset, slice.total_nbytes(), true});
  }
  for (const auto& [at, offset, length] : appended) {
    out.push_back({work_.at(at).number, offset, length, false});
  }
  return encode(std::move(out));
}

Result<TensorView> PlannedFile::whole(int64_t position) const {
  const int64_t number = work_.at(position).number;
  const Facts& facts = work_.items().facts(number);
  const auto dtype = dtype_from_name(facts.dtype);
  if (!dtype) {
    return invalid_argument("cannot write '", work_.items().fqn(number), "': it was planned as ",
                            to_string(facts), ", which only torch can write");
  }
  TensorView view;
  view.dtype = *dtype;
  view.sizes = to_dims(work_.items().box(number).sizes);
  return view;
}

Status PlannedFile::check(int64_t position, const TensorView& found,
                          const TensorView& planned) const {
  if (found.dtype == planned.dtype && found.sizes == planned.sizes) return ok_status();
  return invalid_argument("cannot write '", work_.items().fqn(work_.at(position).number),
                          "': it was planned as ", dtype_info(planned.dtype).name, " of sizes ",
                          to_string(planned.sizes), ", and is ", dtype_info(found.dtype).name,
                          " of sizes ", to_string(found.sizes));
}

}  // namespace torch_ckpt
