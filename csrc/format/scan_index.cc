// Implements the functions of stored_index.h that read all records of one kind or of all kinds.
// They check properties that no single record shows: unique names, and slices that do not overlap.

#include <algorithm>
#include <limits>
#include <utility>

#include "base/xxh3.h"
#include "format/stored_index.h"

namespace torch_ckpt {

namespace records = index_records;

// Bounds the total length of the texts that one pass reads.
class StoredIndex::TextBudget {
 public:
  explicit TextBudget(const StoredIndex& index)
      : index_(index),
        remaining_(checked_mul(index.nbytes_, records::kMaxTextUse)
                       .value_or(std::numeric_limits<int64_t>::max())) {}

  Status use(size_t nbytes) {
    remaining_ -= static_cast<int64_t>(nbytes);
    return remaining_ < 0 ? index_.unsound("it uses too much text") : ok_status();
  }

 private:
  const StoredIndex& index_;
  int64_t remaining_;
};

// One pass over all records.
class StoredIndex::Scan {
 public:
  // Stores the records in `out`, unless `out` is null.
  Scan(const StoredIndex& index, Index* out) : index_(index), out_(out), text_(index) {}

  Status run() {
    ASSIGN_OR_RETURN(std::string version, index_.version());
    ASSIGN_OR_RETURN(std::string stored_save_id, index_.stored_save_id());
    if (out_ != nullptr) {
      out_->save_id = index_.save_id_;
      out_->metadata = index_.metadata_;
      out_->has_entries = index_.has_entries();
      out_->has_paths = index_.has_paths();
      out_->version = std::move(version);
      if (stored_save_id != index_.save_id_) out_->stored_save_id = std::move(stored_save_id);
      out_->is_foreign = index_.is_foreign();
      out_->writer_revision = index_.writer_revision();
    }
    RETURN_IF_ERROR(scan_files());
    RETURN_IF_ERROR(scan_entries());
    RETURN_IF_ERROR(check_overlap());
    ASSIGN_OR_RETURN(std::vector<IndexedPath> paths, index_.paths());
    if (out_ != nullptr) out_->paths = std::move(paths);
    return ok_status();
  }

 private:
  Status scan_files() {
    int64_t next_sum = 0;
    std::vector<std::string> names;
    for (int64_t i = 0; i < index_.file_count(); ++i) {
      ASSIGN_OR_RETURN(StoredFile file, index_.file(i));
      RETURN_IF_ERROR(text_.use(file.name.size()));
      if (file.first_sum != next_sum)
        return index_.unsound("the checksums of ", file.name, " are not in order");
      const int64_t blocks =
          index_.is_foreign() ? 0 : BlockGrid::block_count(file.nbytes, index_.block_nbytes());
      next_sum += blocks;
      names.push_back(file.name);
      if (out_ == nullptr) {
        RETURN_IF_ERROR(index_.check_sums(file, 0, blocks));
        continue;
      }
      IndexedFile& indexed = out_->files.emplace_back();
      indexed.sums.block_nbytes = index_.block_nbytes();
      indexed.sums.file_nbytes = file.nbytes;
      ASSIGN_OR_RETURN(indexed.sums.sums, index_.sums(file, 0, blocks));
      ASSIGN_OR_RETURN(indexed.origin, index_.origin(i));
      indexed.name = std::move(file.name);
    }
    if (next_sum != index_.count(records::kSumSection)) {
      return index_.unsound("checksums are left over");
    }
    return index_.check_names(records::kFileNameSection, names);
  }

  Status scan_entries() {
    constexpr int64_t kBoxesAtATime = 4096;
    int64_t next_dim = 0;
    int64_t next_box = 0;
    std::vector<std::string> fqns;
    for (int64_t i = 0; i < index_.entry_count(); ++i) {
      ASSIGN_OR_RETURN(StoredEntry entry, index_.entry(i));
      const IndexedEntry& facts = entry.facts;
      RETURN_IF_ERROR(
          text_.use(facts.fqn.size() + facts.dtype.size() + facts.memory_format.size()));
      if (entry.first_dim != next_dim || entry.first_box != next_box) {
        return index_.unsound("the record of ", facts.fqn, " contradicts the others");
      }
      next_dim += entry.dim_count();
      next_box += entry.box_count;
      fqns.push_back(facts.fqn);
      if (out_ != nullptr) out_->entries.push_back(entry.facts);
      for (int64_t at = 0; at < entry.box_count; at += kBoxesAtATime) {
        const int64_t last = std::min(at + kBoxesAtATime, entry.box_count);
        ASSIGN_OR_RETURN(std::vector<IndexedBox> boxes, index_.boxes(entry, at, last));
        if (out_ != nullptr) {
          for (int64_t k = at; k < last; ++k) {
            ASSIGN_OR_RETURN(boxes[static_cast<size_t>(k - at)].digest, index_.digest(entry, k));
          }
        }
        RETURN_IF_ERROR(add_boxes(std::move(boxes)));
      }
    }
    if (next_dim != index_.count(records::kDimSection) || next_box != index_.box_count()) {
      return index_.unsound("records are left over");
    }
    return index_.check_names(records::kEntryNameSection, fqns);
  }

  Status add_boxes(std::vector<IndexedBox> boxes) {
    for (IndexedBox& box : boxes) {
      for (const std::string& transform : box.transforms) {
        RETURN_IF_ERROR(text_.use(transform.size()));
      }
      if (box.nbytes > 0) places_.push_back({box.file, box.offset, box.nbytes});
      if (out_ != nullptr) out_->entries.back().boxes.push_back(std::move(box));
    }
    return ok_status();
  }

  // Checks that no two slices share a byte. In a foreign index, tensors may share a storage.
  Status check_overlap() {
    if (index_.is_foreign()) return ok_status();
    std::sort(places_.begin(), places_.end());
    for (size_t i = 1; i < places_.size(); ++i) {
      const StoredPlace& before = places_[i - 1];
      const StoredPlace& place = places_[i];
      if (place.file == before.file && place.offset < before.offset + before.nbytes) {
        return index_.unsound("slices overlap at ", place.offset, " of file ", place.file);
      }
    }
    return ok_status();
  }

  const StoredIndex& index_;
  Index* const out_;
  TextBudget text_;
  std::vector<StoredPlace> places_;
};

// Checks that the Name records match `names`, are sorted, and contain no name twice.
Status StoredIndex::check_names(records::SectionId id,
                                const std::vector<std::string>& names) const {
  std::vector<records::Name> expected;
  expected.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    expected.push_back({xxh3(as_bytes(names[i])), static_cast<uint32_t>(i), 0});
  }
  std::sort(expected.begin(), expected.end());
  int64_t same = 1;
  for (size_t i = 0; i < expected.size(); ++i) {
    records::Name found;
    RETURN_IF_ERROR(read_records(id, static_cast<int64_t>(i), &found, 1));
    if (found != expected[i]) return unsound("names are not in order");
    same = i > 0 && expected[i - 1].hash == found.hash ? same + 1 : 1;
    if (same > records::kMaxSameHash) return unsound("too many names have one hash");
    for (size_t k = i + 1 - static_cast<size_t>(same); k < i; ++k) {
      if (names[expected[k].number] == names[found.number]) {
        return unsound("it lists ", names[found.number], " twice");
      }
    }
  }
  return ok_status();
}

Result<std::vector<std::string>> StoredIndex::fqns() const {
  TextBudget budget(*this);
  std::vector<std::string> out;
  for (int64_t i = 0; i < entry_count(); ++i) {
    std::string& fqn = out.emplace_back();
    RETURN_IF_ERROR(text_of_name(records::kEntrySection, static_cast<uint32_t>(i), &fqn));
    RETURN_IF_ERROR(budget.use(fqn.size()));
  }
  RETURN_IF_ERROR(check_names(records::kEntryNameSection, out));
  return out;
}

Result<std::vector<IndexedPath>> StoredIndex::paths() const {
  TextBudget budget(*this);
  std::vector<IndexedPath> out;
  int64_t next_key = 0;
  const int64_t keys = count(records::kKeySection);
  for (int64_t i = 0; i < count(records::kPathSection); ++i) {
    records::Path from;
    RETURN_IF_ERROR(read_records(records::kPathSection, i, &from, 1));
    IndexedPath& path = out.emplace_back();
    RETURN_IF_ERROR(text(from.fqn, records::kMaxTextNbytes, &path.fqn));
    RETURN_IF_ERROR(budget.use(path.fqn.size()));
    if (std::cmp_not_equal(from.first_key, next_key) ||
        std::cmp_greater(from.key_count, keys - next_key)) {
      return unsound("the path of ", path.fqn, " is missing");
    }
    for (uint64_t k = 0; k < from.key_count; ++k) {
      records::Key key;
      RETURN_IF_ERROR(read_records(records::kKeySection, next_key++, &key, 1));
      if (key.kind == records::kIntKey) {
        path.keys.emplace_back(key.value);
        continue;
      }
      if (key.kind != records::kTextKey || !std::in_range<uint32_t>(key.value)) {
        return unsound("the path of ", path.fqn, " has an invalid key");
      }
      std::string value;
      RETURN_IF_ERROR(
          text({static_cast<uint32_t>(key.value), key.nbytes}, records::kMaxTextNbytes, &value));
      RETURN_IF_ERROR(budget.use(value.size()));
      path.keys.emplace_back(std::move(value));
    }
  }
  if (next_key != keys) return unsound("keys are left over");
  return out;
}

Result<Index> StoredIndex::read_all() const {
  Index out;
  RETURN_IF_ERROR(Scan(*this, &out).run());
  return out;
}

Status StoredIndex::check() const { return Scan(*this, nullptr).run(); }

}  // namespace torch_ckpt
