#include "plan/names.h"

#include <algorithm>
#include <functional>

namespace torch_ckpt {

size_t Names::slot_of(std::string_view name) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = std::hash<std::string_view>()(name) & mask;
  while (slots_[slot] >= 0 && (*this)[slots_[slot]] != name) slot = (slot + 1) & mask;
  return slot;
}

void Names::grow() {
  slots_.assign(std::max<size_t>(16, slots_.size() * 2), -1);
  for (int64_t i = 0; i < size(); ++i) slots_[slot_of((*this)[i])] = static_cast<int32_t>(i);
}

int64_t Names::find(std::string_view name) const {
  return slots_.empty() ? -1 : slots_[slot_of(name)];
}

int64_t Names::add(std::string_view name) {
  if (2 * (ends_.size() + 1) > slots_.size()) grow();
  const int64_t number = size();
  slots_[slot_of(name)] = static_cast<int32_t>(number);
  text_ += name;
  ends_.push_back(static_cast<int64_t>(text_.size()));
  return number;
}

}  // namespace torch_ckpt
