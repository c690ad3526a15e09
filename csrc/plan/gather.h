#pragma once

// Gathers the plans of all ranks by FQN.
//
// Most ranks have equal plans. Plans (of replicas) that list equal items are parsed once and
// represent all their ranks; equal entry sections are parsed once. All other data goes into
// columns. Each item of each distinct plan has a *slot*. The slots of one entry are adjacent,
// ordered by plan and item. global_plan.cc plans with these columns.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "plan/item.h"
#include "plan/plan_wire.h"

namespace torch_ckpt {

// Problems of the plans: the first few, for one message. Callers stop checking when it is full.
class Problems {
 public:
  bool empty() const { return texts_.empty(); }
  bool full() const { return texts_.size() >= 8; }
  void add(std::string text) {
    if (!full()) texts_.push_back(std::move(text));
  }

  // Returns "cannot plan 'a': ...; cannot plan 'b': ...", or OK if there are no problems.
  Status status(StatusCode code) const;

 private:
  std::vector<std::string> texts_;
};

// One item of one plan, by number.
struct Slot {
  int32_t plan = 0;
  int32_t item = 0;
};

// The slots [first, last) of one entry. Valid as long as the plans.
class SlotsOfEntry {
 public:
  SlotsOfEntry(const Facts& facts, const int64_t* words, int64_t begin, int64_t end)
      : first(begin), last(end), facts_(&facts), words_(words), word_count_(word_count(facts)) {}

  const int64_t first;
  const int64_t last;

  // Returns the numbers per slot: offsets and sizes of a box, or nbytes of an object.
  static size_t word_count(const Facts& facts) {
    return facts.is_tensor ? 2 * facts.sizes.size() : 1;
  }

  // Requires: first <= slot < last.
  std::span<const int64_t> words(int64_t slot) const {
    return {words_ + static_cast<size_t>(slot - first) * word_count_, word_count_};
  }
  // An object's box has no dimensions.
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
  // Distinct plans, in the order of their lowest rank.
  std::vector<std::vector<int32_t>> ranks;  // Ranks of each plan, ascending.
  std::vector<int64_t> item_count;          // Number of items of each plan.
  std::vector<int32_t> plan_of_rank;
  std::vector<std::vector<ReplicaRun>> replicas;  // Per rank: the replicas that its items name.

  // All entries, in order of first appearance by rank and item, with the facts of the rank that
  // listed them first. An entry is opaque if it is opaque on any rank.
  EntryTable entries;

  // The slots of entry e are [first_slot[e], first_slot[e + 1]). Their words start at
  // first_word[e].
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

  // All ranks whose plan has this slot, and the lowest of them.
  const std::vector<int32_t>& ranks_of(int64_t slot) const {
    return ranks[static_cast<size_t>(plan_of(slot))];
  }
  int32_t first_rank(int64_t slot) const { return ranks_of(slot).front(); }

  // Returns the replica that an item of a rank names, or kNoReplica.
  int32_t replica_of(int32_t rank, int32_t item) const;
};

// Gathers encoded plans in rank order.
// Errors: kMismatch if ranks disagree on the facts of an FQN; kCorruption or kUnsupported, with the
// rank, if a plan cannot be read.
Result<GatheredPlans> gather(const std::vector<Bytes>& plans);

}  // namespace torch_ckpt
