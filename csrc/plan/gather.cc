#include "plan/gather.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "base/strided.h"
#include "base/xxh3.h"

namespace torch_ckpt {
namespace {

// Limit on the total size, far below 2^63 so that sums cannot overflow.
constexpr int64_t kMaxTotalNbytes = int64_t{1} << 60;

// Assigns a number to each distinct byte string.
class SeenBytes {
 public:
  // Returns the number of equal bytes seen before, or a new number. The bytes outlive this object.
  int32_t number(Bytes bytes) {
    const auto [first, last] = by_sum_.equal_range(xxh3(bytes));
    for (auto it = first; it != last; ++it) {
      if (as_text(seen_[static_cast<size_t>(it->second)]) == as_text(bytes)) return it->second;
    }
    const auto number = static_cast<int32_t>(seen_.size());
    by_sum_.emplace(xxh3(bytes), number);
    seen_.push_back(bytes);
    return number;
  }

 private:
  std::vector<Bytes> seen_;
  std::unordered_multimap<uint64_t, int32_t> by_sum_;
};

// Describes how two ranks' facts differ; empty if they agree.
std::string disagreement(const Facts& a, const Facts& b, const std::string& rank_a,
                         const std::string& rank_b) {
  if (agree(a, b)) return "";
  if (a.is_tensor != b.is_tensor) {
    return str_cat("it is ", a.is_tensor ? "a tensor" : "an object", " on ", rank_a, " and ",
                   b.is_tensor ? "a tensor" : "an object", " on ", rank_b);
  }
  const std::string ranks = rank_a + " and " + rank_b + " disagree on its ";
  if (a.dtype != b.dtype) return str_cat(ranks, "dtype: ", a.dtype, " and ", b.dtype);
  if (a.itemsize != b.itemsize) {
    return str_cat(ranks, "bytes an element: ", a.itemsize, " and ", b.itemsize);
  }
  return str_cat(ranks, "sizes: ", to_string(a.sizes), " and ", to_string(b.sizes));
}

class Gatherer {
 public:
  explicit Gatherer(const std::vector<Bytes>& plans) : plans_(plans) {}

  Result<GatheredPlans> gather() {
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      const Status status = read_entries(static_cast<int32_t>(rank));
      if (!status.ok()) return of_rank(rank, status);
    }
    RETURN_IF_ERROR(problems_.status(StatusCode::kMismatch));
    count_.resize(static_cast<size_t>(out_.entries.size()));
    RETURN_IF_ERROR(for_each_plan(&Gatherer::count_items));
    RETURN_IF_ERROR(make_slots());
    RETURN_IF_ERROR(for_each_plan(&Gatherer::fill_slots));
    RETURN_IF_ERROR(read_replicas());
    return std::move(out_);
  }

 private:
  static Status of_rank(size_t rank, const Status& status) {
    return Status(status.code(), str_cat("the plan of rank ", rank, ": ", status.message()));
  }

  static std::string rank_name(int32_t rank) { return "rank " + std::to_string(rank); }

  // Adds the entries of one rank, unless the same bytes were added before.
  Status read_entries(int32_t rank) {
    ASSIGN_OR_RETURN(const PlanSections sections, open_plan(plans_[static_cast<size_t>(rank)]));
    const int32_t plan = seen_plans_.number(sections.listed);
    out_.plan_of_rank.push_back(plan);
    replicas_.push_back(sections.replicas);
    if (std::cmp_less(plan, out_.ranks.size())) {
      out_.ranks[static_cast<size_t>(plan)].push_back(rank);
      return ok_status();
    }
    out_.ranks.push_back({rank});
    out_.item_count.push_back(0);
    items_.push_back(sections.items);
    section_.push_back(seen_sections_.number(sections.entries));
    if (std::cmp_less(section_.back(), numbers_.size())) return ok_status();
    ASSIGN_OR_RETURN(const EntryTable entries, parse_entries(sections.entries));
    numbers_.push_back(merge_entries(entries, rank));
    return ok_status();
  }

  Status read_replicas() {
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      const auto plan = static_cast<size_t>(out_.plan_of_rank[rank]);
      auto runs = parse_replicas(replicas_[rank], out_.item_count[plan]);
      if (!runs.ok()) return of_rank(rank, runs.status());
      out_.replicas.push_back(*std::move(runs));
    }
    return ok_status();
  }

  // Merges a rank's entries into `out_.entries`. Returns their numbers there.
  std::vector<int32_t> merge_entries(const EntryTable& entries, int32_t rank) {
    std::vector<int64_t> facts_numbers;
    for (const Facts& facts : entries.all_facts()) {
      facts_numbers.push_back(out_.entries.intern(facts));
    }
    std::vector<int32_t> numbers(static_cast<size_t>(entries.size()));
    for (int64_t i = 0; i < entries.size(); ++i) {
      const std::string_view fqn = entries.fqn(i);
      const int64_t facts_number = facts_numbers[static_cast<size_t>(entries.facts_number(i))];
      const int64_t number = out_.entries.find_or_add(fqn, facts_number);
      if (number == std::ssize(first_rank_)) {
        first_rank_.push_back(rank);
      } else if (out_.entries.facts_number(number) != facts_number && !problems_.full()) {
        const std::string found =
            disagreement(out_.entries.facts(number), entries.facts(i),
                         rank_name(first_rank_[static_cast<size_t>(number)]), rank_name(rank));
        if (!found.empty()) problems_.add(str_cat("cannot plan '", fqn, "': ", found));
        // A tensor that is opaque on one rank must stay whole on all.
        if (found.empty() && entries.facts(i).is_opaque) out_.entries.mark_opaque(number);
      }
      numbers[static_cast<size_t>(i)] = static_cast<int32_t>(number);
    }
    return numbers;
  }

  // Calls `read` with the items of each plan.
  Status for_each_plan(Status (Gatherer::*read)(size_t plan, ItemStream* stream, int64_t count)) {
    for (size_t plan = 0; plan < items_.size(); ++plan) {
      ItemStream stream(items_[plan], out_.entries, numbers_[static_cast<size_t>(section_[plan])]);
      int64_t count;
      Status status = stream.begin(&count);
      if (status.ok()) status = (this->*read)(plan, &stream, count);
      if (status.ok()) status = stream.finish();
      if (!status.ok()) return of_rank(static_cast<size_t>(out_.ranks[plan].front()), status);
    }
    return ok_status();
  }

  Status count_items(size_t plan, ItemStream* stream, int64_t count) {
    out_.item_count[plan] = count;
    ItemStream::Item item;
    for (int64_t i = 0; i < count; ++i) {
      if (!stream->next(&item)) return stream->unsound();
      ++count_[static_cast<size_t>(item.entry)];
      if (item.nbytes > kMaxTotalNbytes - total_nbytes_) {
        return invalid_argument("all items together are too large");
      }
      total_nbytes_ += item.nbytes;
    }
    return ok_status();
  }

  int64_t word_count(size_t entry) const {
    return static_cast<int64_t>(
        SlotsOfEntry::word_count(out_.entries.facts(static_cast<int64_t>(entry))));
  }

  Status make_slots() {
    int64_t slot = 0;
    int64_t word = 0;
    for (size_t entry = 0; entry < count_.size(); ++entry) {
      out_.first_slot.push_back(slot);
      out_.first_word.push_back(word);
      slot += count_[entry];
      word += count_[entry] * word_count(entry);
    }
    out_.first_slot.push_back(slot);
    if (slot > std::numeric_limits<int32_t>::max()) {
      return unsupported("the ranks have planned ", slot, " different items");
    }
    out_.slots.resize(static_cast<size_t>(slot));
    out_.words.resize(static_cast<size_t>(word));
    std::copy(out_.first_slot.begin(), out_.first_slot.end() - 1, count_.begin());
    return ok_status();
  }

  // `count_` now has the next free slot of each entry.
  Status fill_slots(size_t plan, ItemStream* stream, int64_t count) {
    ItemStream::Item item;
    for (int64_t i = 0; i < count; ++i) {
      if (!stream->next(&item)) return stream->unsound();
      const auto entry = static_cast<size_t>(item.entry);
      const int64_t slot = count_[entry]++;
      out_.slots[static_cast<size_t>(slot)] = {static_cast<int32_t>(plan), static_cast<int32_t>(i)};
      const size_t ndim = item.box.sizes.size();
      const bool is_object = item.kind == ItemKind::kObject;
      int64_t* words =
          out_.words.data() + out_.first_word[entry] +
          (slot - out_.first_slot[entry]) * static_cast<int64_t>(is_object ? 1 : 2 * ndim);
      if (is_object) *words = item.nbytes;
      for (size_t d = 0; d < ndim; ++d) {
        words[d] = item.box.offsets[d];
        words[d + ndim] = item.box.sizes[d];
      }
    }
    return ok_status();
  }

  const std::vector<Bytes>& plans_;
  GatheredPlans out_;
  Problems problems_;
  SeenBytes seen_plans_;
  SeenBytes seen_sections_;
  std::vector<Bytes> replicas_;                // Replicas section of each rank.
  std::vector<Bytes> items_;                   // Items section of each distinct plan.
  std::vector<int32_t> section_;               // Entries section of each distinct plan, by number.
  std::vector<std::vector<int32_t>> numbers_;  // Per section: its entries in `out_.entries`.
  std::vector<int32_t> first_rank_;            // Per entry: the first rank that listed it.
  std::vector<int64_t> count_;
  int64_t total_nbytes_ = 0;
};

}  // namespace

Status Problems::status(StatusCode code) const {
  if (texts_.empty()) return ok_status();
  std::string all;
  for (const std::string& text : texts_) all += (all.empty() ? "" : "; ") + text;
  return Status(code, full() ? all + "; and perhaps more" : all);
}

int32_t GatheredPlans::replica_of(int32_t rank, int32_t item) const {
  const std::vector<ReplicaRun>& runs = replicas[static_cast<size_t>(rank)];
  const auto run =
      std::upper_bound(runs.begin(), runs.end(), item,
                       [](int32_t at, const ReplicaRun& each) { return at < each.end; });
  return run == runs.end() ? kNoReplica : run->replica;
}

Result<GatheredPlans> gather(const std::vector<Bytes>& plans) { return Gatherer(plans).gather(); }

}  // namespace torch_ckpt
