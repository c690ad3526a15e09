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

// An item of a plan, both by number.
struct Slot {
  int32_t plan = 0;
  int32_t item = 0;
};

// The slots of one entry, [first, last). Valid as long as the plans.
class SlotsOfEntry {
 public:
  SlotsOfEntry(const Facts& facts, const int64_t* words, int64_t begin, int64_t end)
      : first(begin), last(end), facts_(&facts), words_(words), word_count_(word_count(facts)) {}

  const int64_t first;
  const int64_t last;

  // How many numbers a slot has: offsets and sizes of a box, or nbytes of an object.
  static size_t word_count(const Facts& facts) {
    return facts.is_tensor ? 2 * facts.sizes.size() : 1;
  }

  // Requires: first <= slot < last.
  std::span<const int64_t> words(int64_t slot) const {
    return {words_ + static_cast<size_t>(slot - first) * word_count_, word_count_};
  }
  // Without dimensions for an object.
  BoxView box(int64_t slot) const {
    const size_t ndim = word_count_ / 2;
    return {words(slot).first(ndim), words(slot).last(ndim)};
  }
  int64_t nbytes(int64_t slot) const {
    return facts_->is_tensor ? *checked_volume(box(slot).sizes) * facts_->itemsize : words(slot)[0];
  }

 private:
  const Facts* facts_;
  const int64_t* words_;
  size_t word_count_;
};

struct GatheredPlans {
  // Different plans, in the order of the lowest rank of each.
  std::vector<std::vector<int32_t>> ranks;  // Of each plan, ascending.
  std::vector<int64_t> item_count;          // Of each plan.
  std::vector<int32_t> plan_of_rank;

  // All entries, in order of first appearance by rank and item; with the facts of that rank;
  // opaque is what is so on any rank.
  EntryTable entries;

  // Of each entry its slots [first_slot[e], first_slot[e + 1]), and where their words begin.
  std::vector<int64_t> first_slot;
  std::vector<int64_t> first_word;

  std::vector<Slot> slots;
  std::vector<int64_t> words;

  SlotsOfEntry slots_of(int64_t entry) const {
    const auto i = static_cast<size_t>(entry);
    return {entries.facts(entry), words.data() + first_word[i], first_slot[i], first_slot[i + 1]};
  }
  int32_t plan_of(int64_t slot) const { return slots[static_cast<size_t>(slot)].plan; }
  int32_t item_of(int64_t slot) const { return slots[static_cast<size_t>(slot)].item; }

  // All ranks that have a slot, and the lowest of them.
  const std::vector<int32_t>& ranks_of(int64_t slot) const {
    return ranks[static_cast<size_t>(plan_of(slot))];
  }
  int32_t first_rank(int64_t slot) const { return ranks_of(slot).front(); }
};

// Gathers encoded plans in rank order. kMismatch where ranks disagree on what an FQN is;
// kCorruption and kUnsupported, naming the rank, where a plan cannot be read.
Result<GatheredPlans> gather(const std::vector<Bytes>& plans);

}  // namespace torch_ckpt
