#pragma once

// Load balancing: which rank writes each set of replicas. The slowest rank determines the time of a
// save, so the goal is to minimize the maximum load. The algorithm is worst-fit. A tensor that fits
// nowhere is cut along its first dimension. A pure function; called by global_plan.cc.

#include <cstdint>
#include <span>
#include <vector>

namespace torch_ckpt {

// Smaller groups are never cut, and no piece is smaller than half of this. More pieces per file
// make writes and reads slower.
inline constexpr int64_t kMinCutNbytes = int64_t{1} << 20;

// Replicas: the same bytes on several ranks. One rank writes all of them, or several ranks a piece
// each.
struct BalanceGroup {
  int64_t nbytes = 0;
  int32_t replica_set = 0;  // Index into `BalanceInput::replica_sets`.
  int64_t rows = 0;         // Size of the first dimension; below 2 if the group must not be cut.
  int64_t row_nbytes = 0;   // Bytes per row: nbytes = rows * row_nbytes if rows >= 2.
};

struct BalanceInput {
  int64_t ranks_per_node = 1;
  std::vector<int64_t> load;  // Fixed load of each rank, in bytes.
  std::vector<std::vector<int32_t>>
      replica_sets;  // Sets of ranks with replicas; ascending, not empty.
  std::vector<BalanceGroup> groups;
};

// Rows [first_row, first_row + rows) of a group, written by one rank.
struct Piece {
  int32_t rank = 0;
  int64_t first_row = 0;
  int64_t rows = 0;

  bool operator==(const Piece&) const = default;
};

struct Balanced {
  // The pieces of group i are pieces[first_piece[i], first_piece[i + 1]). They are in ascending
  // order of rows and ranks, at most one per rank, and cover the group.
  std::vector<int64_t> first_piece;
  std::vector<Piece> pieces;
  std::vector<int64_t> load;  // Total load of each rank, in bytes.
};

// Balances the groups. Deterministic. If the replicas permit it and rows are small, the maximum
// load is at most 1.02 times the mean plus 1 MiB.
//
// The first phase finds the *fair share*, the least possible maximum load. It treats bytes as
// water: each set of ranks in turn spreads its bytes evenly over its ranks, until no more bytes
// move.
//
// The second phase places the groups. Groups of small sets are placed first, since larger sets can
// still level the result. Within a set, groups that cannot be cut are placed first, then the
// largest. Each group is placed on the rank with the least load, including the expected load from
// later sets. Ties are broken by the node with the least load, then by the lowest rank. A group
// that would exceed the fair share is cut among as few ranks as have room for it.
//
// Requires: all loads and groups together are below 2^61 bytes, and no number is negative.
Balanced balance(const BalanceInput& input);

// Distributes one rank's items over `count` files, largest item first, always to the smallest file.
// Returns the file of each item.
// Requires: count > 0.
std::vector<int32_t> balance_files(std::span<const int64_t> nbytes, int64_t count);

}  // namespace torch_ckpt
