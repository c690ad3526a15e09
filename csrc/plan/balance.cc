#include "plan/balance.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

namespace torch_ckpt {
namespace {

constexpr int64_t kMinPieceNbytes = kMinCutNbytes / 2;

// Allowed load above the fair share. Slack avoids cuts that would gain little.
int64_t slack(int64_t fair_share) { return fair_share / 100 + kMinCutNbytes / 4; }

// The spreading phase ends when a round moves less than 1 / kMinMovedFraction of all bytes, or
// after these limits on rounds and on visits to ranks. Sets that overlap in a chain converge
// slowly.
constexpr int64_t kMinMovedFraction = 10000;
constexpr int kMaxRounds = 200;
constexpr int64_t kMaxVisits = 20'000'000;

template <typename T>
T& at(std::vector<T>& values, int64_t i) {
  return values[static_cast<size_t>(i)];
}
template <typename T>
const T& at(const std::vector<T>& values, int64_t i) {
  return values[static_cast<size_t>(i)];
}

bool may_be_cut(const BalanceGroup& group) {
  return group.rows > 1 && group.nbytes >= kMinCutNbytes;
}

// Returns the water level after pouring `nbytes` into vessels with these loads, rounded down.
int64_t water_level(std::vector<int64_t> loads, int64_t nbytes) {
  std::sort(loads.begin(), loads.end());
  int64_t total = nbytes;
  int64_t vessels = 0;
  for (const int64_t load : loads) {
    if (vessels > 0 && load >= total / vessels) break;
    total += load;
    ++vessels;
  }
  return total / vessels;
}

class Balancer {
 public:
  explicit Balancer(const BalanceInput& input)
      : input_(input),
        expected_(input.load),
        node_load_(input.load.size() / static_cast<size_t>(input.ranks_per_node) + 1) {}

  Balanced run() {
    sort_groups();
    spread();
    fair_share_ = least_busiest();
    for (size_t rank = 0; rank < expected_.size(); ++rank) {
      node_of(static_cast<int32_t>(rank)) += expected_[rank];
    }
    for (const int32_t set : set_order_) place_set(set);
    return result();
  }

 private:
  // A rank in the priority queue; the rank with the least load is served first.
  struct Candidate {
    int64_t load;
    int64_t node_load;
    int32_t rank;
    auto operator<=>(const Candidate&) const = default;
  };
  // A piece of a group, placed on a rank.
  struct Placement {
    int32_t group;
    Piece piece;
  };
  using Queue = std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>>;

  int64_t& node_of(int32_t rank) { return at(node_load_, rank / input_.ranks_per_node); }

  void add_load(int32_t rank, int64_t nbytes) {
    at(expected_, rank) += nbytes;
    node_of(rank) += nbytes;
  }

  // Sorts the sets by size, and the groups of each set in the order of placement.
  void sort_groups() {
    const auto set_count = static_cast<int64_t>(input_.replica_sets.size());
    set_groups_.resize(input_.replica_sets.size());
    set_nbytes_.resize(input_.replica_sets.size());
    for (size_t i = 0; i < input_.groups.size(); ++i) {
      const BalanceGroup& group = input_.groups[i];
      at(set_groups_, group.replica_set).push_back(static_cast<int32_t>(i));
      at(set_nbytes_, group.replica_set) += group.nbytes;
    }
    const auto key = [this](int32_t i) {
      const BalanceGroup& group = at(input_.groups, i);
      const bool is_rigid = group.nbytes >= kMinCutNbytes && !may_be_cut(group);
      return std::tuple(!is_rigid, -group.nbytes, i);
    };
    for (auto& groups : set_groups_) {
      std::sort(groups.begin(), groups.end(),
                [&](int32_t a, int32_t b) { return key(a) < key(b); });
    }
    for (int64_t set = 0; set < set_count; ++set) {
      if (!at(set_groups_, set).empty()) set_order_.push_back(static_cast<int32_t>(set));
    }
    std::stable_sort(set_order_.begin(), set_order_.end(), [this](int32_t a, int32_t b) {
      return at(input_.replica_sets, a).size() < at(input_.replica_sets, b).size();
    });
  }

  // Computes the ideal load of each rank (`expected_`), and the contribution of each set to it
  // (`shares_`).
  void spread() {
    int64_t total = 0;
    int64_t visits_a_round = 1;
    shares_.resize(input_.replica_sets.size());
    for (const int32_t set : set_order_) {
      total += at(set_nbytes_, set);
      visits_a_round += static_cast<int64_t>(at(input_.replica_sets, set).size());
      at(shares_, set).resize(at(input_.replica_sets, set).size());
    }
    const int64_t rounds = std::clamp<int64_t>(kMaxVisits / visits_a_round, 2, kMaxRounds);
    for (int64_t round = 0; round < rounds; ++round) {
      int64_t moved = 0;
      for (const int32_t set : set_order_) moved += spread_set(set);
      if (moved <= total / kMinMovedFraction) break;
    }
  }

  // Spreads the bytes of one set again. Returns the number of bytes that moved.
  int64_t spread_set(int32_t set) {
    const std::vector<int32_t>& ranks = at(input_.replica_sets, set);
    std::vector<int64_t>& shares = at(shares_, set);
    std::vector<int64_t> others(ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) others[i] = at(expected_, ranks[i]) - shares[i];
    const int64_t level = water_level(others, at(set_nbytes_, set));
    int64_t moved = 0;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int64_t share = std::max<int64_t>(level - others[i], 0);
      moved += std::abs(share - shares[i]);
      shares[i] = share;
      at(expected_, ranks[i]) = others[i] + share;
    }
    return moved;
  }

  // Returns a lower bound of the maximum load.
  int64_t least_busiest() const {
    int64_t least = *std::max_element(expected_.begin(), expected_.end());
    std::vector<int64_t> least_load(input_.replica_sets.size());
    for (size_t set = 0; set < least_load.size(); ++set) {
      least_load[set] = std::numeric_limits<int64_t>::max();
      for (const int32_t rank : input_.replica_sets[set]) {
        least_load[set] = std::min(least_load[set], at(input_.load, rank));
      }
    }
    for (const BalanceGroup& group : input_.groups) {
      const int64_t rigid = group.rows > 1 ? group.row_nbytes : group.nbytes;
      least = std::max(least, at(least_load, group.replica_set) + rigid);
    }
    return least;
  }

  // Places the groups of one set: replaces its expected shares by real loads.
  void place_set(int32_t set) {
    const std::vector<int32_t>& ranks = at(input_.replica_sets, set);
    for (size_t i = 0; i < ranks.size(); ++i) add_load(ranks[i], -at(shares_, set)[i]);
    Queue queue;
    for (const int32_t rank : ranks) enqueue(rank, &queue);
    for (const int32_t i : at(set_groups_, set)) {
      const BalanceGroup& group = at(input_.groups, i);
      const Candidate least = dequeue(&queue);
      const int64_t limit = fair_share_ + slack(fair_share_);
      if (may_be_cut(group) && least.load + group.nbytes > limit) {
        cut(group, i, limit, least, &queue);
        continue;
      }
      placements_.push_back({i, {least.rank, 0, group.rows}});
      add_load(least.rank, group.nbytes);
      enqueue(least.rank, &queue);
    }
  }

  void enqueue(int32_t rank, Queue* queue) {
    queue->push({at(expected_, rank), node_of(rank), rank});
  }

  // Returns the next rank to serve. A queued rank's node load may be outdated: the rank is then
  // queued again with the current value.
  Candidate dequeue(Queue* queue) {
    while (true) {
      Candidate least = queue->top();
      queue->pop();
      const int64_t node_load = node_of(least.rank);
      if (least.node_load == node_load) return least;
      least.node_load = node_load;
      queue->push(least);
    }
  }

  // Cuts a group among the least loaded ranks, as few as needed to stay within the limit.
  void cut(const BalanceGroup& group, int32_t number, int64_t limit, const Candidate& least,
           Queue* queue) {
    std::vector<Candidate> chosen = {least};
    const int64_t max_pieces = std::min(group.rows, group.nbytes / kMinPieceNbytes);
    const auto room = [&](const Candidate& rank) {
      return std::max<int64_t>(limit - rank.load, 0) / group.row_nbytes;
    };
    int64_t rows = room(least);
    while (rows < group.rows && std::ssize(chosen) < max_pieces && !queue->empty()) {
      chosen.push_back(dequeue(queue));
      rows += room(chosen.back());
    }
    std::vector<Piece> pieces = share_rows(group, chosen);
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.rank < b.rank; });
    int64_t next_row = 0;
    for (Piece& piece : pieces) {
      piece.first_row = next_row;
      next_row += piece.rows;
      placements_.push_back({number, piece});
      add_load(piece.rank, piece.rows * group.row_nbytes);
    }
    for (const Candidate& rank : chosen) enqueue(rank.rank, queue);
  }

  // Distributes the rows of a group over `chosen`, which ascends by load, so that their loads
  // become level. No piece is smaller than the minimum.
  static std::vector<Piece> share_rows(const BalanceGroup& group,
                                       const std::vector<Candidate>& chosen) {
    // Small rows round down, large rows round to the nearest.
    const int64_t least_piece = group.row_nbytes >= kMinPieceNbytes
                                    ? (group.row_nbytes + 1) / 2
                                    : kMinPieceNbytes + group.row_nbytes;
    int64_t total = group.nbytes;
    for (const Candidate& rank : chosen) total += rank.load;
    size_t count = chosen.size();
    const auto level = [&] { return total / static_cast<int64_t>(count); };
    while (count > 1 && level() - chosen[count - 1].load < least_piece) {
      total -= chosen[--count].load;
    }
    std::vector<Piece> pieces;
    std::vector<std::pair<int64_t, size_t>> levels;
    int64_t left = group.rows;
    for (size_t i = 0; i < count; ++i) {
      const int64_t rows = std::min(left, (level() - chosen[i].load) / group.row_nbytes);
      left -= rows;
      pieces.push_back({chosen[i].rank, 0, rows});
      levels.emplace_back(chosen[i].load + rows * group.row_nbytes, i);
    }
    std::sort(levels.begin(), levels.end());
    for (size_t i = 0; left > 0; i = (i + 1) % count, --left) ++pieces[levels[i].second].rows;
    std::erase_if(pieces, [](const Piece& piece) { return piece.rows == 0; });
    return pieces;
  }

  Balanced result() const {
    Balanced out;
    out.load = expected_;
    out.first_piece.assign(input_.groups.size() + 1, 0);
    for (const Placement& placement : placements_) ++at(out.first_piece, placement.group + 1);
    std::partial_sum(out.first_piece.begin(), out.first_piece.end(), out.first_piece.begin());
    std::vector<int64_t> next = out.first_piece;
    out.pieces.resize(placements_.size());
    for (const Placement& placement : placements_) {
      at(out.pieces, at(next, placement.group)++) = placement.piece;
    }
    return out;
  }

  const BalanceInput& input_;
  std::vector<int64_t> expected_;   // Load of each rank: placed groups and expected shares.
  std::vector<int64_t> node_load_;  // Load of each node: sum over its ranks.
  std::vector<std::vector<int32_t>> set_groups_;
  std::vector<int64_t> set_nbytes_;
  std::vector<int32_t> set_order_;  // Sets that have groups, smallest first.
  std::vector<std::vector<int64_t>> shares_;
  int64_t fair_share_ = 0;
  std::vector<Placement> placements_;
};

}  // namespace

Balanced balance(const BalanceInput& input) {
  if (input.load.empty()) return {.first_piece = {0}, .pieces = {}, .load = {}};
  return Balancer(input).run();
}

std::vector<int32_t> balance_files(std::span<const int64_t> nbytes, int64_t count) {
  std::vector<int32_t> order(nbytes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return nbytes[static_cast<size_t>(a)] > nbytes[static_cast<size_t>(b)];
  });
  using File = std::tuple<int64_t, int64_t, int32_t>;  // (bytes, number of items, file number)
  std::priority_queue<File, std::vector<File>, std::greater<>> files;
  for (int32_t file = 0; file < count; ++file) files.emplace(0, 0, file);
  std::vector<int32_t> out(nbytes.size());
  for (const int32_t item : order) {
    auto [load, items, file] = files.top();
    files.pop();
    at(out, item) = file;
    files.emplace(load + nbytes[static_cast<size_t>(item)], items + 1, file);
  }
  return out;
}

}  // namespace torch_ckpt
