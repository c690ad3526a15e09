#include "plan/check_boxes.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/strided.h"

namespace torch_ckpt {
namespace {

template <typename... Args>
std::string problem(const GatheredPlans& plans, int64_t entry, const Args&... args) {
  return str_cat("cannot plan '", plans.entries.fqn(entry), "': ", args...);
}

bool is_empty(const BoxView& box) {
  return std::find(box.sizes.begin(), box.sizes.end(), 0) != box.sizes.end();
}

}  // namespace

void BoxCheck::check(int64_t entry, Problems* problems) {
  entry_ = entry;
  slots_.emplace(plans_.slots_of(entry));
  order_.resize(static_cast<size_t>(slots_->last - slots_->first));
  std::iota(order_.begin(), order_.end(), static_cast<int32_t>(slots_->first));
  const bool is_tensor = plans_.entries.facts(entry).is_tensor;
  first_.assign(1, 0);
  if (is_tensor) sort_by_box();
  first_.push_back(std::ssize(order_));
  if (!none_twice(problems) || !is_tensor) return;
  if (all_within(problems) && none_overlap(problems) && is_whole_) none_missing(problems);
}

void BoxCheck::sort_by_box() {
  const auto words = [this](int32_t slot) { return slots_->words(slot); };
  const auto is_before = [&](int32_t a, int32_t b) {
    const auto of_a = words(a);
    const auto of_b = words(b);
    const auto [at_a, at_b] = std::mismatch(of_a.begin(), of_a.end(), of_b.begin());
    return at_a == of_a.end() ? a < b : *at_a < *at_b;
  };
  // Usually sorted already: ranks have boxes in rank order.
  if (!std::is_sorted(order_.begin(), order_.end(), is_before)) {
    std::sort(order_.begin(), order_.end(), is_before);
  }
  for (size_t i = 1; i < order_.size(); ++i) {
    const auto former = words(order_[i - 1]);
    if (!std::equal(former.begin(), former.end(), words(order_[i]).begin())) {
      first_.push_back(static_cast<int64_t>(i));
    }
  }
}

bool BoxCheck::none_twice(Problems* problems) const {
  bool fine = true;
  for (int64_t i = 0; i < box_count() && !problems->full(); ++i) {
    const auto slots = replicas(i);
    for (size_t k = 1; k < slots.size(); ++k) {
      if (plans_.plan_of(slots[k]) != plans_.plan_of(slots[k - 1])) continue;
      fine = false;
      const bool is_tensor = plans_.entries.facts(entry_).is_tensor;
      problems->add(problem(plans_, entry_, "rank ", plans_.first_rank(slots[k]), " would write ",
                            is_tensor ? "the box " + to_string(to_box(box(slots[k]))) : "it",
                            " twice"));
      break;
    }
  }
  return fine;
}

bool BoxCheck::all_within(Problems* problems) const {
  bool fine = true;
  const Dims& sizes = plans_.entries.facts(entry_).sizes;
  for (int64_t i = 0; i < box_count() && !problems->full(); ++i) {
    const int32_t slot = replicas(i).front();
    if (lies_within(box(slot), sizes)) continue;
    fine = false;
    problems->add(problem(plans_, entry_, "rank ", plans_.first_rank(slot), " would write the box ",
                          to_string(to_box(box(slot))), " outside of sizes ", to_string(sizes)));
  }
  return fine;
}

// Returns the dimension with the most distinct offsets. A sweep along it has few active boxes.
int64_t BoxCheck::sweep_dim() const {
  int64_t best = 0;
  ptrdiff_t most = 0;
  std::vector<int64_t> offsets(swept_.size());
  const auto ndim = std::ssize(plans_.entries.facts(entry_).sizes);
  for (int64_t d = 0; d < ndim; ++d) {
    const auto offset = [&](int32_t slot) { return box(slot).offsets[static_cast<size_t>(d)]; };
    const int64_t first = offset(swept_[0]);
    // Most dimensions have a single offset: skip the sort.
    if (std::all_of(swept_.begin(), swept_.end(), [&](int32_t s) { return offset(s) == first; })) {
      continue;
    }
    std::transform(swept_.begin(), swept_.end(), offsets.begin(), offset);
    std::sort(offsets.begin(), offsets.end());
    const ptrdiff_t count = std::unique(offsets.begin(), offsets.end()) - offsets.begin();
    if (count > most) {
      most = count;
      best = d;
    }
  }
  return best;
}

bool BoxCheck::none_overlap(Problems* problems) {
  swept_.clear();
  for (int64_t i = 0; i < box_count(); ++i) {
    if (!is_empty(box(replicas(i).front()))) swept_.push_back(replicas(i).front());
  }
  if (swept_.size() < 2) return true;
  const auto d = static_cast<size_t>(sweep_dim());
  const auto begins_before = [&](int32_t a, int32_t b) {
    return box(a).offsets[d] < box(b).offsets[d];
  };
  if (!std::is_sorted(swept_.begin(), swept_.end(), begins_before)) {
    std::stable_sort(swept_.begin(), swept_.end(), begins_before);
  }
  bool fine = true;
  active_.clear();
  for (const int32_t slot : swept_) {
    const BoxView current = box(slot);
    std::erase_if(active_, [&](int32_t other) {
      return box(other).offsets[d] + box(other).sizes[d] <= current.offsets[d];
    });
    for (const int32_t other : active_) {
      if (!overlap(current, box(other))) continue;
      add_overlap(other, slot, problems);
      fine = false;
    }
    if (problems->full()) break;
    active_.push_back(slot);
  }
  return fine;
}

void BoxCheck::add_overlap(int32_t a, int32_t b, Problems* problems) const {
  if (plans_.first_rank(b) < plans_.first_rank(a)) std::swap(a, b);
  const int32_t rank = plans_.first_rank(a);
  const int32_t other = plans_.first_rank(b);
  problems->add(problem(
      plans_, entry_, "rank ", rank, rank == other ? "" : str_cat(" and rank ", other),
      " would write overlapping boxes ", to_string(to_box(box(a))), " and ",
      to_string(to_box(box(b))), " of sizes ", to_string(plans_.entries.facts(entry_).sizes)));
}

void BoxCheck::none_missing(Problems* problems) const {
  const Dims& sizes = plans_.entries.facts(entry_).sizes;
  const int64_t numel = *checked_volume(sizes);
  int64_t covered = 0;
  for (int64_t i = 0; i < box_count(); ++i)
    covered += *checked_volume(box(replicas(i).front()).sizes);
  if (covered == numel) return;
  problems->add(problem(plans_, entry_, "the boxes of all ranks hold ", covered, " of the ", numel,
                        " elements of sizes ", to_string(sizes)));
}

}  // namespace torch_ckpt
