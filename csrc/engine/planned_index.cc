#include "engine/planned_index.h"

#include <utility>

#include "base/strided.h"
#include "plan/item_extents.h"

namespace torch_ckpt {
namespace {

constexpr int32_t kNotPlanned = -2;  // The rank is not to write the item.
constexpr int32_t kNowhere = -1;     // It is, but has not said where it has.

// Where an item was stored.
struct Place {
  int32_t file = kNotPlanned;
  bool plain = false;
  int64_t offset = 0;
  int64_t nbytes = 0;
};

// The places of all items, by rank and item.
class Places {
 public:
  explicit Places(const StoredTable& stored) {
    for (int64_t i = 0; i < stored.box_count(); ++i) {
      const auto rank = static_cast<size_t>(stored.rank(i));
      const auto item = static_cast<size_t>(stored.item(i));
      if (rank >= of_rank_.size()) of_rank_.resize(rank + 1);
      if (item >= of_rank_[rank].size()) of_rank_[rank].resize(item + 1);
      of_rank_[rank][item].file = kNowhere;
    }
  }

  // Of what a rank says, the file of this number.
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
        const bool is_planned = place != nullptr && place->file != kNotPlanned;
        return internal_error("cannot commit: rank ", from.rank, " has written item ", extent.item,
                              is_planned ? " twice" : ", which is not its to write", " (",
                              from.file.name, ")");
      }
      *place = {file, extent.plain, extent.offset, extent.nbytes};
    }
    return ok_status();
  }

  // Requires: the plan has the item.
  const Place& of(int64_t rank, int64_t item) const {
    return of_rank_[static_cast<size_t>(rank)][static_cast<size_t>(item)];
  }

 private:
  // Null where the plan has no such item.
  Place* find(int64_t rank, int64_t item) {
    if (rank < 0 || rank >= std::ssize(of_rank_)) return nullptr;
    std::vector<Place>& places = of_rank_[static_cast<size_t>(rank)];
    if (item >= std::ssize(places)) return nullptr;
    return &places[static_cast<size_t>(item)];
  }

  std::vector<std::vector<Place>> of_rank_;
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
  for (RankFile& file : files) {
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
      const Place& place = places.of(stored.rank(i), stored.item(i));
      if (place.file == kNowhere) {
        return internal_error("cannot commit: the plan has '", entry.fqn, "' at ",
                              to_string(to_dims(box.offsets)), ", and rank ", stored.rank(i),
                              " has not written it");
      }
      entry.boxes.push_back({to_dims(box.offsets),
                             to_dims(box.sizes),
                             place.file,
                             place.offset,
                             place.nbytes,
                             place.plain,
                             {}});
    }
  }
  return out;
}

}  // namespace torch_ckpt
