#include "plan/global_plan.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <tuple>
#include <utility>

#include "plan/balance.h"
#include "plan/check_boxes.h"
#include "plan/gather.h"
#include "plan/names.h"

namespace torch_ckpt {
namespace {

constexpr int32_t kNoRank = -1;
constexpr int64_t kDigestNbytes = 8;
constexpr int64_t kMaxPairs = 8;  // The most pairs of ranks that a `ReplicaDifference` names.

// Distinct sets of ranks that have the same replicas, each identified by the plans of its ranks.
class ReplicaSets {
 public:
  explicit ReplicaSets(const GatheredPlans& plans) : plans_(plans) {}

  // Returns the number of the set of all ranks that have these slots.
  int32_t number(std::span<const int32_t> slots) {
    key_.clear();
    for (const int32_t slot : slots) key_.push_back(plans_.plan_of(slot));
    const auto bytes = std::as_bytes(std::span(key_));
    const int64_t number = keys_.intern(as_text(bytes));
    if (number < std::ssize(sets_)) return static_cast<int32_t>(number);
    std::vector<int32_t>& set = sets_.emplace_back();
    for (const int32_t plan : key_) {
      const std::vector<int32_t>& ranks = plans_.ranks[static_cast<size_t>(plan)];
      set.insert(set.end(), ranks.begin(), ranks.end());
    }
    std::sort(set.begin(), set.end());
    return static_cast<int32_t>(number);
  }

  std::vector<std::vector<int32_t>> release() { return std::move(sets_); }

 private:
  const GatheredPlans& plans_;
  std::vector<int32_t> key_;
  Names keys_;
  std::vector<std::vector<int32_t>> sets_;
};

// The digests of the values of all items.
class ValueDigests {
 public:
  // The outcome of a comparison of replicas.
  enum class Outcome { kUnknown, kEqual, kDifferent };

  // Requires: `digests` is empty, or has 8 bytes for each item of each rank.
  ValueDigests(const GatheredPlans& plans, const std::vector<Bytes>& digests)
      : plans_(plans), digests_(digests) {}

  // Whether values are compared at all.
  bool empty() const { return digests_.empty(); }

  // Compares the replicas in these slots. Adds a pair for each rank that differs from the lowest
  // one with known values.
  Outcome compare(std::span<const int32_t> slots, std::vector<RankPair>* out) const {
    const size_t before = out->size();
    bool all_known = true;
    int32_t lowest = kNoRank;
    uint64_t first = 0;
    for (const int32_t slot : slots) {
      for (const int32_t rank : plans_.ranks_of(slot)) {
        const uint64_t digest = at(rank, plans_.item_of(slot));
        all_known = all_known && digest != 0;
        if (first == 0) {
          first = digest;
          lowest = rank;
        } else if (digest != 0 && digest != first) {
          out->push_back({lowest, rank});
        }
      }
    }
    if (out->size() > before) return Outcome::kDifferent;
    return all_known ? Outcome::kEqual : Outcome::kUnknown;
  }

 private:
  uint64_t at(int32_t rank, int32_t item) const {
    uint64_t digest;
    const size_t begin = static_cast<size_t>(item) * sizeof(digest);
    std::memcpy(&digest, digests_[static_cast<size_t>(rank)].data() + begin, sizeof(digest));
    return digest;
  }

  const GatheredPlans& plans_;
  const std::vector<Bytes>& digests_;
};

Status check_digests(const GatheredPlans& plans, const std::vector<Bytes>& digests) {
  if (digests.empty()) return ok_status();
  if (digests.size() != plans.plan_of_rank.size()) {
    return corruption("there are plans of ", plans.plan_of_rank.size(), " ranks and digests of ",
                      digests.size());
  }
  for (size_t rank = 0; rank < digests.size(); ++rank) {
    const int64_t items = plans.item_count[static_cast<size_t>(plans.plan_of_rank[rank])];
    if (ssize(digests[rank]) / kDigestNbytes != items || ssize(digests[rank]) % kDigestNbytes) {
      return corruption("the plan of rank ", rank, " has ", items, " items and ",
                        digests[rank].size(), " bytes of digests");
    }
  }
  return ok_status();
}

}  // namespace

// Builds a GlobalPlan. Friend of GlobalPlan and StoredTable.
class GlobalPlanner {
 public:
  GlobalPlanner(GatheredPlans plans, const GlobalPlanOptions& options,
                const std::vector<Bytes>& digests)
      : plans_(std::move(plans)),
        options_(options),
        replica_sets_(plans_),
        digests_(plans_, digests) {}

  Result<GlobalPlan> make() {
    out_.equal_.resize(plans_.ranks.size());
    RETURN_IF_ERROR(find_writers());
    balanced_ = balance(input_);
    make_room();
    for (int64_t entry = 0; entry < plans_.entries.size(); ++entry) store_entry(entry);
    out_.stored_.first_box_.push_back(out_.stored_.box_count());
    out_.stored_.entries_ = std::move(plans_.entries);
    out_.plan_of_rank_ = std::move(plans_.plan_of_rank);
    for (std::vector<Cut>& cuts : out_.cuts_) {
      std::sort(cuts.begin(), cuts.end(),
                [](const Cut& a, const Cut& b) { return a.item < b.item; });
    }
    return std::move(out_);
  }

 private:
  // Slots with the same bytes: group i of `input_` has the slots group_slots_[first, last).
  struct Replicas {
    int64_t entry;
    size_t first;
    size_t last;
  };
  // What ranks with different boxes have in common, if they have the same replica of a tensor.
  enum class MatchedBy { kRank, kName, kPlace };
  // A rank that has a box.
  struct Member {
    std::pair<int32_t, int32_t> key;  // Equal for all boxes of a replica, and distinct in a box.
    int32_t rank;
    int32_t number;  // The first replica has the least number.
  };
  // A box to store, in the order of StoredTable.
  struct Stored {
    int32_t rank;
    int32_t item;
    int64_t first_row;
    int64_t rows;  // Number of rows; 0 means all rows of the slot.
    int64_t slot;
  };

  // Validates all plans. Assigns each box that only one rank has to that rank, and each tensor
  // whose replicas may differ to one of them. Makes a group of every other box.
  Status find_writers() {
    const size_t rank_count = plans_.plan_of_rank.size();
    input_.ranks_per_node = options_.ranks_per_node;
    input_.load.resize(rank_count);
    writer_.assign(plans_.slots.size(), kNoRank);
    BoxCheck boxes(plans_, options_.whole);
    Problems problems;
    for (int64_t entry = 0; entry < plans_.entries.size(); ++entry) {
      boxes.check(entry, &problems);
      if (problems.full()) break;
      if (!problems.empty()) continue;
      find_writers_of(entry, boxes);
    }
    input_.replica_sets = replica_sets_.release();
    return problems.status(StatusCode::kInvalidArgument);
  }

  void find_writers_of(int64_t entry, const BoxCheck& boxes) {
    stored_.clear();
    is_equal_.clear();
    pairs_.clear();
    bool all_equal = true;
    for (int64_t i = 0; i < boxes.box_count(); ++i) {
      const auto slots = boxes.replicas(i);
      if (!is_stored(entry, slots)) continue;
      stored_.push_back(slots);
      is_equal_.push_back(compare(entry, slots));
      all_equal = all_equal && is_equal_.back();
    }
    if (!pairs_.empty()) add_difference(entry);
    const bool from_one = !all_equal && (!pairs_.empty() || stored_.size() > 1);
    if (from_one) return write_one_replica(entry);
    for (size_t i = 0; i < stored_.size(); ++i) find_writer(entry, stored_[i], is_equal_[i]);
  }

  // Whether a box is in the table of stored boxes.
  bool is_stored(int64_t entry, std::span<const int32_t> slots) const {
    const SlotsOfEntry of_entry = plans_.slots_of(entry);
    const Facts& facts = plans_.entries.facts(entry);
    const bool is_empty = facts.is_tensor && of_entry.nbytes(slots[0]) == 0;
    return !is_empty || (slots[0] == of_entry.first && *checked_volume(facts.sizes) == 0);
  }

  bool is_alone(std::span<const int32_t> slots) const {
    return slots.size() == 1 && plans_.ranks_of(slots[0]).size() == 1;
  }

  void find_writer(int64_t entry, std::span<const int32_t> slots, bool are_equal) {
    if (is_alone(slots) || !options_.dedup) {
      return write_on(plans_.first_rank(slots[0]), entry, slots);
    }
    const SlotsOfEntry of_entry = plans_.slots_of(entry);
    const int64_t nbytes = of_entry.nbytes(slots[0]);
    const Facts& facts = plans_.entries.facts(entry);
    // A box without bytes counts as one byte, so that one rank does not get all of them.
    BalanceGroup group = {std::max<int64_t>(nbytes, 1), replica_sets_.number(slots)};
    const bool may_cut = options_.split && facts.is_tensor && !facts.is_opaque && are_equal;
    if (may_cut && !facts.sizes.empty()) {
      const int64_t rows = of_entry.box(slots[0]).sizes[0];
      if (rows > 1) {
        group.rows = rows;
        group.row_nbytes = nbytes / rows;
      }
    }
    input_.groups.push_back(group);
    replicas_.push_back({entry, group_slots_.size(), group_slots_.size() + slots.size()});
    group_slots_.insert(group_slots_.end(), slots.begin(), slots.end());
  }

  // Assigns a box to one of the ranks that have it.
  void write_on(int32_t rank, int64_t entry, std::span<const int32_t> slots) {
    const int32_t slot = slot_on(rank, slots);
    writer_[static_cast<size_t>(slot)] = rank;
    input_.load[static_cast<size_t>(rank)] += plans_.slots_of(entry).nbytes(slot);
  }

  // Returns the slot of a rank among the slots of a box.
  int32_t slot_on(int32_t rank, std::span<const int32_t> slots) const {
    const int32_t plan = plans_.plan_of_rank[static_cast<size_t>(rank)];
    return *std::lower_bound(
        slots.begin(), slots.end(), plan,
        [this](int32_t slot, int32_t wanted) { return plans_.plan_of(slot) < wanted; });
  }

  // Assigns all boxes of a tensor to one of its replicas, since they may have different values.
  // Differing tensors are all written from the first replica: together they are the state of its
  // ranks. If values are unknown, the replica with the least load is chosen.
  void write_one_replica(int64_t entry) {
    const std::vector<std::vector<Member>> members = replicas();
    const bool by_load = pairs_.empty() && options_.dedup;
    const auto cost_of = [&](size_t replica) {
      int64_t load = 0;
      for (size_t i = 0; by_load && i < members.size(); ++i) {
        load = std::max(load, input_.load[static_cast<size_t>(members[i][replica].rank)]);
      }
      return std::pair(load, members[0][replica].number);
    };
    size_t chosen = 0;
    for (size_t i = 1; i < members[0].size(); ++i) {
      if (cost_of(i) < cost_of(chosen)) chosen = i;
    }
    for (size_t i = 0; i < stored_.size(); ++i) {
      write_on(members[i][chosen].rank, entry, stored_[i]);
    }
  }

  // Returns the members of each box in `stored_`. Members at the same position form a replica: all
  // are of one rank. If no rank has all boxes, a replica consists of ranks that name the same
  // replica, or of the k-th member of every box if they name none.
  std::vector<std::vector<Member>> replicas() const {
    for (const MatchedBy by : {MatchedBy::kRank, MatchedBy::kName}) {
      std::vector<std::vector<Member>> members = matched(by);
      if (!members[0].empty()) return members;
    }
    return matched(MatchedBy::kPlace);
  }

  // Returns the members of each box, without those of replicas that another box lacks.
  std::vector<std::vector<Member>> matched(MatchedBy by) const {
    const auto is_before = [](const Member& a, const Member& b) { return a.key < b.key; };
    std::vector<std::vector<Member>> members;
    std::vector<Member> common;
    for (const auto slots : stored_) {
      members.push_back(members_of(slots, by));
      if (members.size() == 1) common = members[0];
      std::erase_if(common, [&](const Member& member) {
        return !std::binary_search(members.back().begin(), members.back().end(), member, is_before);
      });
    }
    for (auto& of_box : members) {
      std::erase_if(of_box, [&](const Member& member) {
        return !std::binary_search(common.begin(), common.end(), member, is_before);
      });
    }
    return members;
  }

  // Returns the ranks of a box, ascending by key.
  std::vector<Member> members_of(std::span<const int32_t> slots, MatchedBy by) const {
    std::vector<Member> out;
    for (const int32_t slot : slots) {
      for (const int32_t rank : plans_.ranks_of(slot)) {
        const int32_t name = plans_.replica_of(rank, plans_.item_of(slot));
        const int32_t key = by == MatchedBy::kRank   ? rank
                            : by == MatchedBy::kName ? name
                                                     : kNoReplica;
        out.push_back({{key, 0}, rank, name == kNoReplica ? rank : name});
      }
    }
    std::sort(out.begin(), out.end(), [](const Member& a, const Member& b) {
      return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
    });
    for (size_t i = 1; i < out.size(); ++i) {
      if (out[i].key.first == out[i - 1].key.first) out[i].key.second = out[i - 1].key.second + 1;
    }
    return out;
  }

  // Returns whether the replicas of a box are known to be equal, or are not compared. Adds pairs of
  // ranks with different values to `pairs_`.
  bool compare(int64_t entry, std::span<const int32_t> slots) {
    const bool has_values =
        plans_.entries.facts(entry).is_tensor && plans_.slots_of(entry).nbytes(slots[0]) > 0;
    if (is_alone(slots) || !has_values || digests_.empty()) return true;
    if (digests_.compare(slots, &pairs_) != ValueDigests::Outcome::kEqual) return false;
    const int32_t set = replica_sets_.number(slots);
    for (const int32_t slot : slots) {
      std::vector<EqualReplicas>& equal = out_.equal_[static_cast<size_t>(plans_.plan_of(slot))];
      const int32_t item = plans_.item_of(slot);
      if (equal.empty() || equal.back().replica_set != set ||
          equal.back().first + equal.back().count != item) {
        equal.push_back({set, item, 0});
      }
      ++equal.back().count;
    }
    return true;
  }

  void add_difference(int64_t entry) {
    // Two ranks may have several boxes in common.
    std::sort(pairs_.begin(), pairs_.end());
    pairs_.erase(std::unique(pairs_.begin(), pairs_.end()), pairs_.end());
    ReplicaDifference& found = out_.differences_.emplace_back();
    found.fqn = plans_.entries.fqn(entry);
    found.pair_count = std::ssize(pairs_);
    found.pairs.assign(pairs_.begin(), pairs_.begin() + std::min(found.pair_count, kMaxPairs));
  }

  void make_room() {
    // Upper bounds, larger than needed if there are replicas. Unused reserved memory costs nothing.
    out_.stored_.ranks_.reserve(plans_.slots.size());
    out_.stored_.items_.reserve(plans_.slots.size());
    out_.stored_.dims_.reserve(plans_.words.size());
    out_.load_.resize(plans_.plan_of_rank.size());
    out_.cuts_.resize(plans_.plan_of_rank.size());
    for (const int32_t plan : plans_.plan_of_rank) {
      out_.written_.emplace_back(plans_.item_count[static_cast<size_t>(plan)]);
    }
  }

  // Stores the boxes of an entry. Requires: their writers are known.
  void store_entry(int64_t entry) {
    boxes_.clear();
    const SlotsOfEntry slots = plans_.slots_of(entry);
    for (int64_t slot = slots.first; slot < slots.last; ++slot) {
      const int32_t rank = writer_[static_cast<size_t>(slot)];
      if (rank != kNoRank) boxes_.push_back({rank, plans_.item_of(slot), 0, 0, slot});
    }
    // Groups are in the order of entries.
    for (; next_group_ < replicas_.size() && replicas_[next_group_].entry == entry; ++next_group_) {
      add_pieces(next_group_);
    }
    const auto is_before = [](const Stored& a, const Stored& b) {
      return std::tie(a.rank, a.item, a.first_row) < std::tie(b.rank, b.item, b.first_row);
    };
    if (!std::is_sorted(boxes_.begin(), boxes_.end(), is_before)) {
      std::sort(boxes_.begin(), boxes_.end(), is_before);
    }
    out_.stored_.first_box_.push_back(out_.stored_.box_count());
    out_.stored_.first_dim_.push_back(static_cast<int64_t>(out_.stored_.dims_.size()));
    const bool is_tensor = plans_.entries.facts(entry).is_tensor;
    for (const Stored& box : boxes_) store(slots, is_tensor, box);
  }

  void add_pieces(size_t group) {
    const Replicas& replicas = replicas_[group];
    const auto first = static_cast<size_t>(balanced_.first_piece[group]);
    const auto last = static_cast<size_t>(balanced_.first_piece[group + 1]);
    for (size_t i = first; i < last; ++i) {
      const Piece& piece = balanced_.pieces[i];
      const auto slots =
          std::span(group_slots_).subspan(replicas.first, replicas.last - replicas.first);
      const int32_t slot = slot_on(piece.rank, slots);
      const bool is_whole = last - first == 1;
      boxes_.push_back({piece.rank, plans_.item_of(slot), is_whole ? 0 : piece.first_row,
                        is_whole ? 0 : piece.rows, slot});
    }
  }

  void store(const SlotsOfEntry& slots, bool is_tensor, const Stored& box) {
    StoredTable& stored = out_.stored_;
    const auto rank = static_cast<size_t>(box.rank);
    stored.ranks_.push_back(box.rank);
    stored.items_.push_back(box.item);
    out_.written_[rank][static_cast<size_t>(box.item)] = true;
    int64_t nbytes = slots.nbytes(box.slot);
    if (is_tensor) {
      const auto words = slots.words(box.slot);
      stored.dims_.insert(stored.dims_.end(), words.begin(), words.end());
      if (box.rows > 0) {
        int64_t* offsets = stored.dims_.data() + (stored.dims_.size() - words.size());
        int64_t* sizes = offsets + words.size() / 2;
        nbytes = nbytes / sizes[0] * box.rows;
        offsets[0] += box.first_row;
        sizes[0] = box.rows;
        out_.cuts_[rank].push_back({box.item, box.first_row, box.rows});
      }
    }
    out_.load_[rank] += nbytes;
  }

  GatheredPlans plans_;
  const GlobalPlanOptions options_;
  ReplicaSets replica_sets_;
  const ValueDigests digests_;
  BalanceInput input_;
  Balanced balanced_;
  // For the present entry: the slots of each box to store, whether its replicas are known to be
  // equal, and the pairs of ranks whose values differ.
  std::vector<std::span<const int32_t>> stored_;
  std::vector<bool> is_equal_;
  std::vector<RankPair> pairs_;
  std::vector<int32_t> writer_;  // Per slot: the rank that writes it whole, or kNoRank.
  std::vector<Replicas> replicas_;
  std::vector<int32_t> group_slots_;
  size_t next_group_ = 0;
  std::vector<Stored> boxes_;
  GlobalPlan out_;
};

BoxView StoredTable::box(int64_t entry, int64_t i) const {
  const size_t ndim = entries_.facts(entry).sizes.size();
  const auto begin = static_cast<size_t>(first_dim_[static_cast<size_t>(entry)]) +
                     static_cast<size_t>(i - first_box(entry)) * 2 * ndim;
  const auto dims = std::span(dims_).subspan(begin, 2 * ndim);
  return {dims.first(ndim), dims.last(ndim)};
}

void StoredTable::add(std::string_view fqn, const Facts& facts, const std::vector<Box>& boxes,
                      const std::vector<int32_t>& ranks, const std::vector<int32_t>& items) {
  entries_.find_or_add(fqn, entries_.intern(facts));
  first_box_.push_back(box_count());
  first_dim_.push_back(static_cast<int64_t>(dims_.size()));
  ranks_.insert(ranks_.end(), ranks.begin(), ranks.end());
  items_.insert(items_.end(), items.begin(), items.end());
  for (const Box& box : boxes) {
    dims_.insert(dims_.end(), box.offsets.begin(), box.offsets.end());
    dims_.insert(dims_.end(), box.sizes.begin(), box.sizes.end());
  }
}

GlobalPlan GlobalPlan::of(StoredTable stored) {
  GlobalPlan out;
  out.stored_ = std::move(stored);
  return out;
}

Result<GlobalPlan> GlobalPlan::make(const std::vector<Bytes>& plans,
                                    const GlobalPlanOptions& options,
                                    const std::vector<Bytes>& digests) {
  if (options.ranks_per_node < 1) {
    return invalid_argument("a node cannot have ", options.ranks_per_node, " ranks");
  }
  ASSIGN_OR_RETURN(GatheredPlans gathered, gather(plans));
  RETURN_IF_ERROR(check_digests(gathered, digests));
  return GlobalPlanner(std::move(gathered), options, digests).make();
}

const std::vector<EqualReplicas>& GlobalPlan::equal_replicas(int64_t rank) const {
  return equal_[static_cast<size_t>(plan_of_rank_[static_cast<size_t>(rank)])];
}

Assignment GlobalPlan::assignment(int64_t rank) const {
  const std::vector<bool>& written = written_[static_cast<size_t>(rank)];
  Assignment out;
  out.item_count = static_cast<int64_t>(written.size());
  for (int64_t item = 0; item < out.item_count; ++item) {
    if (!written[static_cast<size_t>(item)]) continue;
    if (out.runs.empty() || out.runs.back().first + out.runs.back().count < item) {
      out.runs.push_back({item, 0});
    }
    ++out.runs.back().count;
  }
  out.cuts = cuts_[static_cast<size_t>(rank)];
  return out;
}

}  // namespace torch_ckpt
