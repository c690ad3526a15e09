#include "plan/names.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace torch_ckpt {

size_t Names::slot_of(std::string_view name) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = std::hash<std::string_view>()(name) & mask;
  while (slots_[slot] >= 0 && (*this)[slots_[slot]] != name) slot = (slot + 1) & mask;
  return slot;
}

void Names::resize_slots(size_t count) {
  slots_.assign(count, -1);
  for (int64_t i = 0; i < size(); ++i) slots_[slot_of((*this)[i])] = static_cast<int32_t>(i);
}

void Names::reserve(int64_t count) {
  ends_.reserve(static_cast<size_t>(count));
  const size_t slots = std::bit_ceil(2 * static_cast<size_t>(count) + 2);
  if (slots > slots_.size()) resize_slots(slots);
}

int64_t Names::find(std::string_view name) const {
  return slots_.empty() ? -1 : slots_[slot_of(name)];
}

int64_t Names::intern(std::string_view name) {
  if (2 * (ends_.size() + 1) > slots_.size()) {
    resize_slots(std::max<size_t>(16, slots_.size() * 2));
  }
  const size_t slot = slot_of(name);
  if (slots_[slot] >= 0) return slots_[slot];
  slots_[slot] = static_cast<int32_t>(size());
  text_ += name;
  ends_.push_back(static_cast<int64_t>(text_.size()));
  return slots_[slot];
}

}  // namespace torch_ckpt
