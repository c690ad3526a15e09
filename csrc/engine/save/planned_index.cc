#include "engine/save/planned_index.h"

#include <algorithm>
#include <utility>

#include "base/strided.h"
#include "engine/save/reuse.h"
#include "plan/item_extents.h"

namespace torch_ckpt {
namespace {

constexpr int32_t kNowhere = -1;

// Where a box is stored. `file` is kNowhere until a rank reports the box.
struct Place {
  int32_t file = kNowhere;
  bool plain = false;
  int64_t offset = 0;
  int64_t nbytes = 0;
};

// The places of all boxes. Each rank reports a place by the number of the item in its list.
class Places {
 public:
  explicit Places(const StoredTable& stored) : places_(static_cast<size_t>(stored.box_count())) {
    for (int64_t i = 0; i < stored.box_count(); ++i) {
      const auto rank = static_cast<size_t>(stored.rank(i));
      if (rank >= items_by_rank_.size()) items_by_rank_.resize(rank + 1);
      items_by_rank_[rank].push_back({stored.item(i), i});
    }
    for (std::vector<Item>& items : items_by_rank_) {
      const auto is_before = [](const Item& a, const Item& b) { return a.number < b.number; };
      if (!std::is_sorted(items.begin(), items.end(), is_before)) {
        std::sort(items.begin(), items.end(), is_before);
      }
    }
  }

  // Adds the extents that a rank reports for the file with number `file`.
  Status add(const RankFile& from, int32_t file) {
    const auto extents = decode_extents(from.extents);
    if (!extents.ok()) {
      return Status(extents.status().code(),
                    str_cat("cannot commit: rank ", from.rank, ", ", from.file.name, ": ",
                            extents.status().message()));
    }
    for (const ItemExtent& extent : *extents) {
      Place* place = find(from.rank, extent.item);
      if (place == nullptr || place->file != kNowhere) {
        return internal_error("cannot commit: rank ", from.rank, " has written item ", extent.item,
                              place == nullptr ? ", which is not its to write" : " twice", " (",
                              from.file.name, ")");
      }
      *place = {file, extent.plain, extent.offset, extent.nbytes};
    }
    return ok_status();
  }

  const Place& operator[](int64_t box) const { return places_[static_cast<size_t>(box)]; }

 private:
  struct Item {
    int64_t number;
    int64_t box;
  };

  Place* find(int64_t rank, int64_t number) {
    if (rank < 0 || rank >= std::ssize(items_by_rank_)) return nullptr;
    const std::vector<Item>& items = items_by_rank_[static_cast<size_t>(rank)];
    const auto found =
        std::lower_bound(items.begin(), items.end(), number,
                         [](const Item& item, int64_t wanted) { return item.number < wanted; });
    if (found == items.end() || found->number != number) return nullptr;
    return &places_[static_cast<size_t>(found->box)];
  }

  std::vector<std::vector<Item>> items_by_rank_;  // Each ascending by item number.
  std::vector<Place> places_;
};

IndexedEntry to_entry(const EntryTable& entries, int64_t number) {
  const Facts& facts = entries.facts(number);
  IndexedEntry out;
  out.fqn = entries.fqn(number);
  out.is_tensor = facts.is_tensor;
  out.dtype = facts.dtype;
  out.memory_format = facts.memory_format;
  out.requires_grad = facts.requires_grad;
  out.pin_memory = facts.pin_memory;
  out.sizes = facts.sizes;
  return out;
}

}  // namespace

Result<Index> planned_index(const StoredTable& stored, std::vector<RankFile> files) {
  Places places(stored);
  Index out;
  std::vector<Bytes> digests;
  for (RankFile& file : files) {
    digests.push_back(file.digests);
    RETURN_IF_ERROR(places.add(file, static_cast<int32_t>(out.files.size())));
    out.files.push_back(std::move(file.file));
  }
  const EntryTable& entries = stored.entries();
  out.has_entries = true;
  out.entries.reserve(static_cast<size_t>(entries.size()));
  for (int64_t number = 0; number < entries.size(); ++number) {
    IndexedEntry& entry = out.entries.emplace_back(to_entry(entries, number));
    const int64_t last = stored.first_box(number + 1);
    entry.boxes.reserve(static_cast<size_t>(last - stored.first_box(number)));
    for (int64_t i = stored.first_box(number); i < last; ++i) {
      const BoxView box = stored.box(number, i);
      const Place& place = places[i];
      if (place.file == kNowhere) {
        return internal_error("cannot commit: the plan has '", entry.fqn, "' at ",
                              to_string(to_dims(box.offsets)), ", and rank ", stored.rank(i),
                              " has not written it");
      }
      const Facts& facts = entries.facts(number);
      const auto volume = checked_volume(box.sizes);
      if (place.plain && (!volume || place.nbytes < *volume * facts.itemsize)) {
        return internal_error("cannot commit: rank ", stored.rank(i), " has written ", place.nbytes,
                              " bytes of '", entry.fqn, "' at ", to_string(to_dims(box.offsets)),
                              ", which has more");
      }
      entry.boxes.push_back({to_dims(box.offsets),
                             to_dims(box.sizes),
                             place.file,
                             place.offset,
                             place.nbytes,
                             place.plain,
                             {},
                             {}});
    }
  }
  RETURN_IF_ERROR(add_digests(out, digests));
  return out;
}

}  // namespace torch_ckpt
