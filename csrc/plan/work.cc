#include "plan/work.h"

#include <utility>

namespace torch_ckpt {

Work::Work(std::shared_ptr<const ItemTable> items) : table_(std::move(items)) {
  items_.reserve(static_cast<size_t>(table_->size()));
  for (int64_t i = 0; i < table_->size(); ++i) items_.push_back({i});
}

Result<Work> Work::assigned(std::shared_ptr<const ItemTable> items, const Assignment& assignment) {
  RETURN_IF_ERROR(check_assignment(assignment, *items));
  Work work(std::move(items));
  work.items_.clear();
  auto cut = assignment.cuts.begin();
  for (const Run& run : assignment.runs) {
    for (int64_t i = run.first; i < run.first + run.count; ++i) {
      Item& item = work.items_.emplace_back(Item{i});
      if (cut == assignment.cuts.end() || cut->item != i) continue;
      item.first_row = cut->first_row;
      item.rows = cut->rows;
      ++cut;
    }
  }
  return work;
}

Work Work::part(const std::vector<int64_t>& positions) const {
  Work out = *this;
  out.items_.clear();
  for (const int64_t position : positions) out.items_.push_back(at(position));
  return out;
}

int64_t Work::nbytes(const Item& item) const {
  const int64_t all = items().nbytes(item.number);
  if (item.rows < 0 || all == 0) return all;
  return all / items().box(item.number).sizes[0] * item.rows;
}

}  // namespace torch_ckpt
