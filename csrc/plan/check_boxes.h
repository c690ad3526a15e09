#pragma once

// Checks that the planned boxes of one tensor cover it. Each box is inside the tensor, boxes
// overlap only if they are equal, and no element is missing. Same rules as DCP's
// `_validate_global_plan`, applied before replicas are removed.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "plan/gather.h"

namespace torch_ckpt {

// Checks one entry at a time and reuses its memory.
class BoxCheck {
 public:
  // `plans` outlives this object. `whole`: the plans cover all ranks of the save.
  BoxCheck(const GatheredPlans& plans, bool whole)
      : plans_(plans), is_whole_(whole && plans.plan_of_rank.size() > 1) {}

  // Adds the problems of an entry to `problems`. Objects with the same FQN count as equal on all
  // ranks. As in DCP, missing elements are allowed if only one rank saves. They are also allowed if
  // `whole` is false.
  void check(int64_t entry, Problems* problems);

  // The boxes of the last checked entry: the slots of each box, in ascending order. Valid until the
  // next check.
  int64_t box_count() const { return static_cast<int64_t>(first_.size()) - 1; }
  std::span<const int32_t> replicas(int64_t i) const {
    const auto begin = static_cast<size_t>(first_[static_cast<size_t>(i)]);
    const auto end = static_cast<size_t>(first_[static_cast<size_t>(i) + 1]);
    return std::span(order_).subspan(begin, end - begin);
  }

 private:
  BoxView box(int32_t slot) const { return slots_->box(slot); }
  void sort_by_box();
  bool all_within(Problems* problems) const;
  bool none_twice(Problems* problems) const;
  bool none_overlap(Problems* problems);
  void none_missing(Problems* problems) const;
  int64_t sweep_dim() const;
  void add_overlap(int32_t a, int32_t b, Problems* problems) const;

  const GatheredPlans& plans_;
  const bool is_whole_;
  int64_t entry_ = 0;
  std::optional<SlotsOfEntry> slots_;  // Slots of the entry.
  std::vector<int32_t> order_;         // Slots sorted by box.
  std::vector<int64_t> first_;         // Start of each box in `order_`, and the end.
  std::vector<int32_t> swept_;         // One slot per box that is not empty.
  std::vector<int32_t> active_;
};

}  // namespace torch_ckpt
