#include "engine/save/reuse.h"

#include <algorithm>
#include <cstring>

#include "engine/value_digest.h"

namespace torch_ckpt {
namespace {

// The box that an item stores, in its whole tensor.
BoxName name_of(const Work& work, const Work::Item& item) {
  const BoxView box = work.items().box(item.number);
  Dims offsets = to_dims(box.offsets);
  if (item.rows >= 0) offsets[0] += item.first_row;
  return {std::string(work.items().fqn(item.number)), std::move(offsets)};
}

Dims sizes_of(const Work& work, const Work::Item& item) {
  Dims sizes = to_dims(work.items().box(item.number).sizes);
  if (item.rows >= 0) sizes[0] = item.rows;
  return sizes;
}

// Returns the box of the base with this name, dtype and sizes, and its digest.
Result<std::optional<BaseBox>> find(const StoredIndex& base, const BoxName& name,
                                    const std::string& dtype, const Dims& sizes) {
  using Found = std::optional<BaseBox>;
  ASSIGN_OR_RETURN(const auto number, base.find_entry(name.first));
  if (!number) return Found();
  ASSIGN_OR_RETURN(const StoredEntry entry, base.entry(*number));
  if (!entry.facts.is_tensor || entry.facts.dtype != dtype) return Found();
  ASSIGN_OR_RETURN(const auto at, base.find_box(entry, name.second, 0));
  if (!at) return Found();
  ASSIGN_OR_RETURN(const auto boxes, base.boxes(entry, *at, *at + 1));
  const IndexedBox& box = boxes.front();
  if (box.sizes != sizes || !box.plain || !box.transforms.empty()) return Found();
  BaseBox out = {.position = 0, .place = {box.file, box.offset, box.nbytes}, .digest = {}};
  ASSIGN_OR_RETURN(out.digest, base.digest(entry, *at));
  return Found(out);
}

}  // namespace

Result<BaseBoxes> find_in_base(const StoredIndex& base, const Work& work,
                               std::span<const uint64_t> samples,
                               std::span<const std::optional<BoxName>> names) {
  BaseBoxes out;
  if (!base.has_entries() || base.is_foreign() || !base.has_digests()) return out;
  for (int64_t at = 0; at < work.size(); ++at) {
    const auto i = static_cast<size_t>(at);
    const Work::Item& item = work.at(at);
    const Facts& facts = work.items().facts(item.number);
    if (samples[i] == kUnknownDigest || !facts.is_tensor) continue;
    if (!names.empty() && !names[i]) continue;
    const BoxName name = names.empty() ? name_of(work, item) : *names[i];
    ASSIGN_OR_RETURN(auto found, find(base, name, facts.dtype, sizes_of(work, item)));
    if (!found || found->digest.sample == kUnknownDigest) continue;
    if (found->digest.sample != samples[i]) {
      out.changed.push_back(at);
    } else if (found->digest.low != kUnknownDigest) {
      found->position = at;
      out.equal.push_back(*found);
    }
  }
  return out;
}

Status add_digests(Index& index, std::span<const Bytes> reports) {
  if (reports.size() != index.files.size()) return internal_error("files lack reports of digests");
  std::vector<std::vector<SliceDigest>> of_files;
  for (const Bytes report : reports) {
    if (report.size() % sizeof(SliceDigest) != 0) {
      return internal_error("a report of digests ends within a record");
    }
    auto& digests = of_files.emplace_back(report.size() / sizeof(SliceDigest));
    if (!report.empty()) std::memcpy(digests.data(), report.data(), report.size());
    if (!std::ranges::is_sorted(digests, {}, &SliceDigest::offset)) {
      return internal_error("a report of digests is not in order");
    }
  }
  for (IndexedEntry& entry : index.entries) {
    for (IndexedBox& box : entry.boxes) {
      if (!range_within(box.file, 1, std::ssize(of_files))) {
        return internal_error(entry.fqn, " lies in no file");
      }
      const auto& digests = of_files[static_cast<size_t>(box.file)];
      const auto found = std::ranges::lower_bound(digests, box.offset, {}, &SliceDigest::offset);
      // Two empty tensors do not share an offset: each has a frame.
      if (box.plain && found != digests.end() && found->offset == box.offset) {
        box.digest = found->digest;
      }
    }
  }
  return ok_status();
}

}  // namespace torch_ckpt
