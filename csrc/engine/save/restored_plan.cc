#include "engine/save/restored_plan.h"

#include <charconv>
#include <optional>
#include <string>
#include <utility>

#include "base/dtype.h"

namespace torch_ckpt {
namespace {

// "__3_0_0123456789abcdef.distcp" is of rank 3.
std::optional<int32_t> rank_of(std::string_view name) {
  if (!name.starts_with("__")) return std::nullopt;
  name.remove_prefix(2);
  int32_t rank = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), rank);
  if (error != std::errc() || end == name.data() + name.size() || *end != '_') return std::nullopt;
  return rank;
}

Result<std::vector<int32_t>> ranks_of_files(const StoredIndex& index) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < index.file_count(); ++i) {
    ASSIGN_OR_RETURN(const StoredFile file, index.file(i));
    const auto rank = rank_of(file.name);
    if (!rank) return mismatch(file.name, " is not named by the rank that wrote it");
    out.push_back(*rank);
  }
  return out;
}

Facts facts_of(const IndexedEntry& entry) {
  Facts out;
  out.is_tensor = entry.is_tensor;
  if (!entry.is_tensor) return out;
  const auto dtype = dtype_from_name(entry.dtype);
  out.dtype = entry.dtype;
  out.itemsize = dtype ? itemsize(*dtype) : 1;  // Nobody asks for more of what torch has stored.
  out.memory_format = entry.memory_format;
  out.requires_grad = entry.requires_grad;
  out.pin_memory = entry.pin_memory;
  out.sizes = entry.sizes;
  return out;
}

// The rows of `whole` that `stored` is, all of them as {0, -1}; nothing where it is something else.
std::optional<std::pair<int64_t, int64_t>> rows_of(const IndexedBox& stored, const BoxView& whole) {
  for (size_t d = 1; d < whole.sizes.size(); ++d) {
    if (stored.offsets[d] != whole.offsets[d] || stored.sizes[d] != whole.sizes[d]) {
      return std::nullopt;
    }
  }
  if (whole.sizes.empty()) return std::pair<int64_t, int64_t>(0, -1);
  const int64_t first = stored.offsets[0] - whole.offsets[0];
  if (first < 0 || first + stored.sizes[0] > whole.sizes[0]) return std::nullopt;
  if (stored.sizes[0] == whole.sizes[0]) return std::pair<int64_t, int64_t>(0, -1);
  return std::pair(first, stored.sizes[0]);
}

// Adds item after item to an assignment.
class Assigner {
 public:
  explicit Assigner(int64_t item_count) { out_.assignment.item_count = item_count; }

  void add(int64_t item, std::pair<int64_t, int64_t> rows, int64_t number) {
    std::vector<Run>& runs = out_.assignment.runs;
    if (runs.empty() || runs.back().first + runs.back().count < item) runs.push_back({item, 0});
    ++runs.back().count;
    if (rows.second >= 0) out_.assignment.cuts.push_back({item, rows.first, rows.second});
    out_.numbers.push_back(number);
  }

  RestoredWork take() { return std::move(out_); }

 private:
  RestoredWork out_;
};

}  // namespace

Result<StoredTable> restore_stored(const StoredIndex& index) {
  ASSIGN_OR_RETURN(const std::vector<int32_t> rank_of_file, ranks_of_files(index));
  StoredTable out;
  std::vector<Box> boxes;
  std::vector<int32_t> ranks;
  std::vector<int32_t> items;
  for (int64_t number = 0; number < index.entry_count(); ++number) {
    ASSIGN_OR_RETURN(const StoredEntry entry, index.entry(number));
    ASSIGN_OR_RETURN(auto stored, index.boxes(entry, 0, entry.box_count));
    boxes.clear();
    ranks.clear();
    items.clear();
    for (IndexedBox& box : stored) {
      items.push_back(static_cast<int32_t>(entry.first_box + std::ssize(items)));
      ranks.push_back(rank_of_file[static_cast<size_t>(box.file)]);
      boxes.push_back({std::move(box.offsets), std::move(box.sizes)});
    }
    out.add(entry.facts.fqn, facts_of(entry.facts), boxes, ranks, items);
  }
  out.end();
  return out;
}

Result<RestoredWork> restore_work(const StoredIndex& index, const ItemTable& items, int64_t rank) {
  ASSIGN_OR_RETURN(const std::vector<int32_t> rank_of_file, ranks_of_files(index));
  Assigner out(items.size());
  for (int64_t item = 0; item < items.size(); ++item) {
    const Facts& facts = items.facts(item);
    ASSIGN_OR_RETURN(const auto number, index.find_entry(items.fqn(item)));
    if (!number) return mismatch("'", items.fqn(item), "' is not in the checkpoint");
    ASSIGN_OR_RETURN(const StoredEntry entry, index.entry(*number));
    if (entry.facts.is_tensor != facts.is_tensor || entry.facts.dtype != facts.dtype ||
        entry.facts.sizes != facts.sizes) {
      return mismatch("'", items.fqn(item), "' is not what is in the checkpoint");
    }
    const BoxView whole = items.box(item);
    std::vector<int64_t> candidates = {0};
    if (entry.box_count != 1) {
      ASSIGN_OR_RETURN(candidates,
                       index.overlapping(entry, to_dims(whole.offsets), to_dims(whole.sizes)));
    }
    bool is_written = false;
    for (const int64_t at : candidates) {
      ASSIGN_OR_RETURN(const auto box, index.boxes(entry, at, at + 1));
      if (rank_of_file[static_cast<size_t>(box.front().file)] != rank) continue;
      const auto rows = rows_of(box.front(), whole);
      if (!rows || is_written) continue;  // Of another of its items, of the same FQN.
      is_written = true;
      out.add(item, *rows, entry.first_box + at);
    }
  }
  return out.take();
}

}  // namespace torch_ckpt
