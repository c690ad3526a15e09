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

// How far above the fair share a rank may come so that less is cut.
int64_t slack(int64_t fair_share) { return fair_share / 100 + kMinCutNbytes / 4; }

// Spreading ends when a round has moved less than this part of all bytes, or after as many rounds,
// or visits to a rank: sets that overlap in a chain even out slowly.
constexpr int64_t kMovedPart = 10000;
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

// The level to which `nbytes` fill vessels that hold `loads` already, rounded down.
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
  // A rank that waits for more: the least of these is served first.
  struct Waiting {
    int64_t load;
    int64_t node_load;
    int32_t rank;
    auto operator<=>(const Waiting&) const = default;
  };
  struct Given {
    int32_t group;
    Piece piece;
  };
  using Queue = std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>>;

  int64_t& node_of(int32_t rank) { return at(node_load_, rank / input_.ranks_per_node); }

  void add_load(int32_t rank, int64_t nbytes) {
    at(expected_, rank) += nbytes;
    node_of(rank) += nbytes;
  }

  // Narrow sets first; the groups of each in the order in which they are given out.
  void sort_groups() {
    const auto set_count = static_cast<int64_t>(input_.holders.size());
    set_groups_.resize(input_.holders.size());
    set_nbytes_.resize(input_.holders.size());
    for (size_t i = 0; i < input_.groups.size(); ++i) {
      const BalanceGroup& group = input_.groups[i];
      at(set_groups_, group.holders).push_back(static_cast<int32_t>(i));
      at(set_nbytes_, group.holders) += group.nbytes;
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
      return at(input_.holders, a).size() < at(input_.holders, b).size();
    });
  }

  // Fills `expected_` with what each rank would write if bytes were water, and `shares_` with what
  // each set brings of it to each of its ranks.
  void spread() {
    int64_t total = 0;
    int64_t visits_a_round = 1;
    shares_.resize(input_.holders.size());
    for (const int32_t set : set_order_) {
      total += at(set_nbytes_, set);
      visits_a_round += static_cast<int64_t>(at(input_.holders, set).size());
      at(shares_, set).resize(at(input_.holders, set).size());
    }
    const int64_t rounds = std::clamp<int64_t>(kMaxVisits / visits_a_round, 2, kMaxRounds);
    for (int64_t round = 0; round < rounds; ++round) {
      int64_t moved = 0;
      for (const int32_t set : set_order_) moved += spread_set(set);
      if (moved <= total / kMovedPart) break;
    }
  }

  // Spreads one set anew; returns how many bytes that moved.
  int64_t spread_set(int32_t set) {
    const std::vector<int32_t>& ranks = at(input_.holders, set);
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

  // Somebody has at least this much to write, whatever is done.
  int64_t least_busiest() const {
    int64_t least = *std::max_element(expected_.begin(), expected_.end());
    std::vector<int64_t> least_load(input_.holders.size());
    for (size_t set = 0; set < least_load.size(); ++set) {
      least_load[set] = std::numeric_limits<int64_t>::max();
      for (const int32_t rank : input_.holders[set]) {
        least_load[set] = std::min(least_load[set], at(input_.load, rank));
      }
    }
    for (const BalanceGroup& group : input_.groups) {
      const int64_t rigid = group.rows > 1 ? group.row_nbytes : group.nbytes;
      least = std::max(least, at(least_load, group.holders) + rigid);
    }
    return least;
  }

  // Gives out the groups of one set, whose expected shares become real ones.
  void place_set(int32_t set) {
    const std::vector<int32_t>& ranks = at(input_.holders, set);
    for (size_t i = 0; i < ranks.size(); ++i) add_load(ranks[i], -at(shares_, set)[i]);
    Queue queue;
    for (const int32_t rank : ranks) enqueue(rank, &queue);
    for (const int32_t i : at(set_groups_, set)) {
      const BalanceGroup& group = at(input_.groups, i);
      const Waiting least = dequeue(&queue);
      const int64_t limit = fair_share_ + slack(fair_share_);
      if (may_be_cut(group) && least.load + group.nbytes > limit) {
        cut(group, i, limit, least, &queue);
        continue;
      }
      given_.push_back({i, {least.rank, 0, group.rows}});
      add_load(least.rank, group.nbytes);
      enqueue(least.rank, &queue);
    }
  }

  void enqueue(int32_t rank, Queue* queue) {
    queue->push({at(expected_, rank), node_of(rank), rank});
  }

  // The rank to be served next. The load of its node may have grown while it waited: then it waits
  // again, with the load as it is.
  Waiting dequeue(Queue* queue) {
    while (true) {
      Waiting least = queue->top();
      queue->pop();
      const int64_t node_load = node_of(least.rank);
      if (least.node_load == node_load) return least;
      least.node_load = node_load;
      queue->push(least);
    }
  }

  // Cuts a group among the least loaded ranks: as many as it takes to stay within the limit.
  void cut(const BalanceGroup& group, int32_t number, int64_t limit, const Waiting& least,
           Queue* queue) {
    std::vector<Waiting> chosen = {least};
    const int64_t most = std::min(group.rows, group.nbytes / kMinPieceNbytes);
    const auto room = [&](const Waiting& rank) {
      return std::max<int64_t>(limit - rank.load, 0) / group.row_nbytes;
    };
    int64_t rows = room(least);
    while (rows < group.rows && std::ssize(chosen) < most && !queue->empty()) {
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
      given_.push_back({number, piece});
      add_load(piece.rank, piece.rows * group.row_nbytes);
    }
    for (const Waiting& rank : chosen) enqueue(rank.rank, queue);
  }

  // How many rows each of `chosen`, ascending by load, gets: level, but none a piece that is too
  // small.
  static std::vector<Piece> share_rows(const BalanceGroup& group,
                                       const std::vector<Waiting>& chosen) {
    // Small rows are rounded down, large ones to the nearest.
    const int64_t least_piece = group.row_nbytes >= kMinPieceNbytes
                                    ? (group.row_nbytes + 1) / 2
                                    : kMinPieceNbytes + group.row_nbytes;
    int64_t total = group.nbytes;
    for (const Waiting& rank : chosen) total += rank.load;
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
    for (const Given& given : given_) ++at(out.first_piece, given.group + 1);
    std::partial_sum(out.first_piece.begin(), out.first_piece.end(), out.first_piece.begin());
    std::vector<int64_t> next = out.first_piece;
    out.pieces.resize(given_.size());
    for (const Given& given : given_) at(out.pieces, at(next, given.group)++) = given.piece;
    return out;
  }

  const BalanceInput& input_;
  std::vector<int64_t> expected_;   // Of each rank: given out, and shares of sets still to come.
  std::vector<int64_t> node_load_;  // The same of each node.
  std::vector<std::vector<int32_t>> set_groups_;
  std::vector<int64_t> set_nbytes_;
  std::vector<int32_t> set_order_;  // Of sets that have groups.
  std::vector<std::vector<int64_t>> shares_;
  int64_t fair_share_ = 0;
  std::vector<Given> given_;
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
  using File = std::tuple<int64_t, int64_t, int32_t>;  // Its bytes, its items, its number.
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
