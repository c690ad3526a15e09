#pragma once

// Whether the boxes that all ranks would write of one tensor make it up: each inside, none
// overlapping another unless they are the same, nothing left out. The same rules as DCP's
// `_validate_global_plan`, before replicas are dropped.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "plan/gather.h"

namespace torch_ckpt {

// Looks at one entry after another; memory is kept between them.
class BoxCheck {
 public:
  // `plans` outlive this. `whole`: whether they are of all ranks.
  BoxCheck(const GatheredPlans& plans, bool whole)
      : plans_(plans), is_whole_(whole && plans.plan_of_rank.size() > 1) {}

  // Adds what is wrong with the slots of an entry. Objects of one FQN are taken to be the same on
  // all ranks. As in DCP, what a rank saves alone need not be all of a tensor; nor need what only
  // some ranks hold.
  void check(int64_t entry, Problems* problems);

  // Of the entry that was checked last: its slots by box, and those of one box ascending. Valid
  // until the next check.
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
  std::optional<SlotsOfEntry> slots_;  // Of the entry.
  std::vector<int32_t> order_;         // Slots, equal boxes side by side.
  std::vector<int64_t> first_;         // Where in `order_` each box begins, and the end.
  std::vector<int32_t> swept_;         // A slot of each box that is not empty.
  std::vector<int32_t> active_;
};

}  // namespace torch_ckpt
