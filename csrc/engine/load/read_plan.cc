#include "engine/load/read_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "geometry/cover.h"

namespace torch_ckpt {
namespace {

// Sets the offsets and lengths of the intersection of two boxes. Requires: the boxes overlap.
void intersect_into(const IndexedBox& stored, const BoxView& wanted, PlannedRead* out) {
  for (size_t d = 0; d < wanted.sizes.size(); ++d) {
    const int64_t begin = std::max(stored.offsets[d], wanted.offsets[d]);
    const int64_t end =
        std::min(stored.offsets[d] + stored.sizes[d], wanted.offsets[d] + wanted.sizes[d]);
    out->storage_offsets.push_back(begin - stored.offsets[d]);
    out->dest_offsets.push_back(begin - wanted.offsets[d]);
    out->lengths.push_back(end - begin);
  }
}

PlannedRead to_read(int64_t item, int64_t number, const IndexedBox& box) {
  PlannedRead out;
  out.item = item;
  out.box = number;
  out.place = {box.file, box.offset, box.nbytes};
  out.is_transformed = !box.transforms.empty();
  out.box_offsets = box.offsets;
  return out;
}

// Drops all but the first of equal boxes, which are replicas. Returns whether it dropped any.
bool drop_replicas(const std::vector<IndexedBox>& boxes, std::vector<PlannedRead>* reads,
                   size_t first) {
  std::set<std::pair<Dims, Dims>> seen;
  size_t end = first;
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!seen.emplace(boxes[i].offsets, boxes[i].sizes).second) continue;
    if (end != first + i) (*reads)[end] = std::move((*reads)[first + i]);
    ++end;
  }
  const bool found = end != reads->size();
  reads->resize(end);
  return found;
}

// Checks that the reads from `first` on fill the wanted box.
Status check_reads(const StoredEntry& entry, const BoxView& wanted,
                   const std::vector<PlannedRead>& reads, size_t first) {
  const bool is_filled_by_one =
      reads.size() == first + 1 &&
      std::equal(wanted.sizes.begin(), wanted.sizes.end(), reads[first].lengths.begin());
  if (is_filled_by_one) return ok_status();
  std::vector<Box> filled;
  filled.reserve(reads.size() - first);
  for (size_t i = first; i < reads.size(); ++i) {
    Box& box = filled.emplace_back(Box{reads[i].dest_offsets, reads[i].lengths});
    for (size_t d = 0; d < wanted.offsets.size(); ++d) box.offsets[d] += wanted.offsets[d];
  }
  return check_cover(entry.facts.fqn, to_box(wanted), std::move(filled));
}

Status plan_item(const StoredIndex& index, const StoredEntry& entry, const ItemTable& items,
                 int64_t item, std::vector<PlannedRead>* out) {
  if (!entry.facts.is_tensor) {
    ASSIGN_OR_RETURN(const auto boxes, index.boxes(entry, 0, 1));
    out->push_back(to_read(item, 0, boxes.front()));
    out->back().is_object = true;
    return ok_status();
  }
  const Facts& facts = items.facts(item);
  if (!facts.is_tensor) {
    return mismatch("'", entry.facts.fqn, "' is stored as a tensor, and wanted as an object");
  }
  if (facts.sizes != entry.facts.sizes) {
    return mismatch("'", entry.facts.fqn, "' is stored in sizes ", to_string(entry.facts.sizes),
                    ", and wanted in ", to_string(facts.sizes));
  }
  const BoxView wanted = items.box(item);
  if (checked_volume(wanted.sizes) == 0) return ok_status();
  if (!lies_within(wanted, facts.sizes)) {
    return invalid_argument("'", entry.facts.fqn, "' has sizes ", to_string(facts.sizes),
                            ", and is wanted at ", to_string(to_box(wanted)));
  }
  std::vector<int64_t> numbers = {0};
  if (entry.box_count != 1) {
    ASSIGN_OR_RETURN(numbers,
                     index.overlapping(entry, to_dims(wanted.offsets), to_dims(wanted.sizes)));
  }
  const size_t first = out->size();
  std::vector<IndexedBox> stored;
  for (const int64_t number : numbers) {
    ASSIGN_OR_RETURN(auto boxes, index.boxes(entry, number, number + 1));
    const IndexedBox& box = boxes.front();
    // For several boxes, `overlapping` has already filtered them.
    if (entry.box_count == 1 &&
        (checked_volume(box.sizes) == 0 || !overlap({box.offsets, box.sizes}, wanted))) {
      continue;
    }
    out->push_back(to_read(item, number, box));
    intersect_into(box, wanted, &out->back());
    stored.push_back(std::move(boxes.front()));
  }
  Status status = check_reads(entry, wanted, *out, first);
  if (status.code() == StatusCode::kCorruption && drop_replicas(stored, out, first)) {
    status = check_reads(entry, wanted, *out, first);
  }
  return status;
}

}  // namespace

Result<ReadPlan> ReadPlan::make(const StoredIndex& index, const ItemTable& items, bool partial) {
  ReadPlan out;
  out.dtypes_.resize(static_cast<size_t>(items.size()));
  out.files_.resize(static_cast<size_t>(index.file_count()));
  StoredEntry entry;
  int64_t known = -1;  // Number of `entry` in the table.
  for (int64_t item = 0; item < items.size(); ++item) {
    if (items.entry(item) != known) {
      ASSIGN_OR_RETURN(const auto number, index.find_entry(items.fqn(item)));
      if (!number) {
        if (partial) continue;
        return Status(StatusCode::kNotFound,
                      str_cat("'", items.fqn(item), "' is not in the checkpoint"));
      }
      ASSIGN_OR_RETURN(entry, index.entry(*number));
      known = items.entry(item);
    }
    const auto first = out.reads_.size();
    RETURN_IF_ERROR(plan_item(index, entry, items, item, &out.reads_));
    out.dtypes_[static_cast<size_t>(item)] = entry.facts.dtype;
    for (auto read = first; read < out.reads_.size(); ++read) {
      const int64_t file = out.reads_[read].place.file;
      std::string& name = out.files_[static_cast<size_t>(file)];
      if (!name.empty()) continue;
      ASSIGN_OR_RETURN(StoredFile stored, index.file(file));
      name = std::move(stored.name);
    }
  }
  return out;
}

}  // namespace torch_ckpt
