#include "plan/item.h"

#include "base/bytes.h"
#include "base/strided.h"

namespace torch_ckpt {
namespace {

template <typename... Args>
Status refused(std::string_view fqn, const Args&... args) {
  return invalid_argument("cannot plan '", fqn, "': ", args...);
}

// Distinct facts have distinct keys: a zero byte ends each name, and no name contains one.
std::string facts_key(const Facts& facts) {
  std::string key = {static_cast<char>(facts.is_tensor), static_cast<char>(facts.requires_grad),
                     static_cast<char>(facts.pin_memory), static_cast<char>(facts.is_opaque)};
  key += facts.dtype;
  key += '\0';
  key += facts.memory_format;
  key += '\0';
  const auto add = [&key](int64_t value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  add(facts.itemsize);
  for (const int64_t size : facts.sizes) add(size);
  return key;
}

bool is_word(std::string_view text) {
  return !text.empty() && text.size() <= kMaxWordNbytes &&
         text.find('\0') == std::string_view::npos;
}

// Checks a box and computes the size of its data.
Status check_box(std::string_view fqn, const Facts& facts, const Box& box, int64_t* nbytes) {
  if (box.offsets.size() != facts.sizes.size() || box.sizes.size() != facts.sizes.size()) {
    return refused(fqn, "a box of ", box.offsets.size(), " offsets and ", box.sizes.size(),
                   " sizes cannot lie in a tensor of sizes ", to_string(facts.sizes));
  }
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    if (box.offsets[d] < 0 || box.sizes[d] < 0 || !checked_add(box.offsets[d], box.sizes[d])) {
      return refused(fqn, "a box has offsets ", to_string(box.offsets), " and sizes ",
                     to_string(box.sizes));
    }
  }
  const auto volume = checked_volume(box.sizes);
  const auto product = volume ? checked_mul(*volume, facts.itemsize) : std::nullopt;
  if (!product) return refused(fqn, "a box of sizes ", to_string(box.sizes), " is too large");
  *nbytes = *product;
  return ok_status();
}

}  // namespace

std::string to_string(const Facts& facts) {
  if (!facts.is_tensor) return "an object";
  return str_cat(facts.dtype, " (", facts.itemsize, " bytes an element) of sizes ",
                 to_string(facts.sizes), ", ", facts.memory_format,
                 facts.requires_grad ? ", requires_grad" : "",
                 facts.pin_memory ? ", pin_memory" : "", facts.is_opaque ? ", opaque" : "");
}

int64_t EntryTable::intern(const Facts& facts) {
  const int64_t number = facts_keys_.intern(facts_key(facts));
  if (number == std::ssize(facts_)) facts_.push_back(facts);
  return number;
}

int64_t EntryTable::find_or_add(std::string_view fqn, int64_t facts_number) {
  const int64_t entry = fqns_.intern(fqn);
  if (entry == std::ssize(facts_of_)) facts_of_.push_back(static_cast<int32_t>(facts_number));
  return entry;
}

void EntryTable::mark_opaque(int64_t entry) {
  Facts opaque = facts(entry);
  opaque.is_opaque = true;
  facts_of_[static_cast<size_t>(entry)] = static_cast<int32_t>(intern(opaque));
}

void EntryTable::reserve(int64_t entries) {
  fqns_.reserve(entries);
  facts_of_.reserve(static_cast<size_t>(entries));
}

Status check_facts(std::string_view fqn, const Facts& facts) {
  if (!facts.is_tensor) {
    if (facts == Facts{}) return ok_status();
    return refused(fqn, "an object has no dtype and no sizes");
  }
  if (!is_word(facts.dtype) || !is_word(facts.memory_format)) {
    return refused(fqn, "'", facts.dtype, "' and '", facts.memory_format,
                   "' do not name a dtype and a memory format");
  }
  if (facts.itemsize <= 0) return refused(fqn, "its items have ", facts.itemsize, " bytes");
  if (std::ssize(facts.sizes) > kMaxNdim) {
    return refused(fqn, "it has ", facts.sizes.size(), " dimensions, more than ", kMaxNdim);
  }
  const auto numel = checked_numel(facts.sizes);
  if (!numel || !checked_mul(*numel, facts.itemsize)) {
    return refused(fqn, "its sizes ", to_string(facts.sizes), " are negative or too large");
  }
  return ok_status();
}

Status ItemTable::add_object(std::string_view fqn, int64_t nbytes) {
  const int64_t entry = entries_.find(fqn);
  if (nbytes < 0) return refused(fqn, "an object has ", nbytes, " bytes");
  if (entry >= 0 && entries_.facts(entry).is_tensor) {
    return refused(fqn, "it is listed as a tensor and as an object");
  }
  append(entries_.find_or_add(fqn, entries_.intern(Facts{})), ItemKind::kObject, {}, nbytes);
  return ok_status();
}

Status ItemTable::add_tensor(std::string_view fqn, const Facts& facts, ItemKind kind,
                             const Box& box) {
  if (kind == ItemKind::kObject || !facts.is_tensor) return refused(fqn, "it is not a tensor");
  const int64_t entry = entries_.find(fqn);
  if (entry < 0) {
    RETURN_IF_ERROR(check_facts(fqn, facts));
  } else if (entries_.facts(entry) != facts) {
    return refused(fqn, "it is listed with different facts: as ", to_string(entries_.facts(entry)),
                   " and as ", to_string(facts));
  }
  int64_t nbytes = 0;
  RETURN_IF_ERROR(check_box(fqn, facts, box, &nbytes));
  const int64_t number = entry >= 0 ? entry : entries_.find_or_add(fqn, entries_.intern(facts));
  append(number, kind, {box.offsets, box.sizes}, nbytes);
  return ok_status();
}

void ItemTable::set_replica(int32_t replica) {
  replicas_.resize(entries_of_.size(), kNoReplica);
  replicas_.back() = replica;
}

void ItemTable::append(int64_t entry, ItemKind kind, const BoxView& box, int64_t nbytes) {
  entries_of_.push_back(static_cast<int32_t>(entry));
  kinds_.push_back(kind);
  nbytes_.push_back(nbytes);
  first_dims_.push_back(static_cast<int64_t>(dims_.size()));
  dims_.insert(dims_.end(), box.offsets.begin(), box.offsets.end());
  dims_.insert(dims_.end(), box.sizes.begin(), box.sizes.end());
}

BoxView ItemTable::box(int64_t item) const {
  const size_t ndim = facts(item).sizes.size();
  const auto dims = std::span(dims_).subspan(
      static_cast<size_t>(first_dims_[static_cast<size_t>(item)]), 2 * ndim);
  return {dims.first(ndim), dims.last(ndim)};
}

}  // namespace torch_ckpt
