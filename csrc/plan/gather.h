#pragma once

// The plans of all ranks, brought together by FQN.
//
// Ranks are many and alike. Equal plans (of replicas) are read once and stand for all their ranks;
// equal sections of entries are parsed once. What is left goes into columns: a *slot* for each item
// of each different plan, the slots of one entry side by side, in order of plans and of their
// items. global_plan.cc decides on them.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "plan/item.h"

namespace torch_ckpt {

// What is wrong with the plans: the first few, for one message. Looking on ends when it is full.
class Problems {
 public:
  bool empty() const { return texts_.empty(); }
  bool full() const { return texts_.size() >= 8; }
  void add(std::string text) {
    if (!full()) texts_.push_back(std::move(text));
  }

  // "cannot plan 'a': ...; cannot plan 'b': ...", or OK where there are none.
  Status status(StatusCode code) const;

 private:
  std::vector<std::string> texts_;
};

struct GatheredPlans {
  // Different plans, in the order of the lowest rank of each.
  std::vector<std::vector<int32_t>> ranks;  // Of each plan, ascending.
  std::vector<int64_t> item_count;          // Of each plan.
  std::vector<int32_t> plan_of_rank;

  // All entries, in order of first appearance by rank and item; with the facts of that rank.
  EntryTable entries;

  // Of each entry its slots [first_slot[e], first_slot[e + 1]), and where their words begin.
  std::vector<int64_t> first_slot;
  std::vector<int64_t> first_word;

  std::vector<int32_t> plan;   // Of each slot.
  std::vector<int32_t> item;   // Of each slot, as its plan numbers it.
  std::vector<int64_t> words;  // Of each slot: offsets and sizes of a box, or nbytes of an object.

  int64_t slot_count() const { return first_slot.back(); }

  // How many words a slot of an entry has.
  size_t word_count(int64_t entry) const {
    const Facts& facts = entries.facts(entry);
    return facts.is_tensor ? 2 * facts.sizes.size() : 1;
  }
  std::span<const int64_t> slot_words(int64_t entry, int64_t slot) const {
    const size_t count = word_count(entry);
    const auto at = static_cast<size_t>(first_word[static_cast<size_t>(entry)]) +
                    static_cast<size_t>(slot - first_slot[static_cast<size_t>(entry)]) * count;
    return std::span(words).subspan(at, count);
  }
  // Requires: the entry is a tensor.
  BoxView box(int64_t entry, int64_t slot) const {
    const auto both = slot_words(entry, slot);
    return {both.first(both.size() / 2), both.last(both.size() / 2)};
  }
  int64_t slot_nbytes(int64_t entry, int64_t slot) const {
    const Facts& facts = entries.facts(entry);
    if (!facts.is_tensor) return slot_words(entry, slot)[0];
    return *checked_volume(box(entry, slot).sizes) * facts.itemsize;
  }

  // The lowest rank that has a slot.
  int32_t first_rank(int64_t slot) const {
    return ranks[static_cast<size_t>(plan[static_cast<size_t>(slot)])].front();
  }
};

// Gathers encoded plans in rank order. kMismatch where ranks disagree on what an FQN is;
// kCorruption and kUnsupported, naming the rank, where a plan cannot be read.
Result<GatheredPlans> gather(const std::vector<Bytes>& plans);

}  // namespace torch_ckpt
