#pragma once

// Balancing: who writes what several ranks hold. The slowest rank sets the time of a save, so the
// aim is the least load of the busiest rank: worst-fit, and where whole tensors do not fit, cut
// along their first dimension. A function of values; global_plan.h asks it.

#include <cstdint>
#include <span>
#include <vector>

namespace torch_ckpt {

// Less than this is never cut, and no piece is below half of it: a file in more pieces costs more
// to write and to read.
inline constexpr int64_t kMinCutNbytes = int64_t{1} << 20;

// The same bytes on several ranks, of which one is to write them, or each a part.
struct BalanceGroup {
  int64_t nbytes = 0;
  int32_t holders = 0;     // Which of `BalanceInput::holders`.
  int64_t rows = 0;        // Along the first dimension; below 2 where it must stay whole.
  int64_t row_nbytes = 0;  // Then nbytes = rows * row_nbytes.
};

struct BalanceInput {
  int64_t ranks_per_node = 1;
  std::vector<int64_t> load;                  // Bytes that each rank writes in any case.
  std::vector<std::vector<int32_t>> holders;  // Sets of ranks, each ascending and not empty.
  std::vector<BalanceGroup> groups;
};

// `rows` rows of a group from `first_row` on; of a group that stays whole, all there are.
struct Piece {
  int32_t rank = 0;
  int64_t first_row = 0;
  int64_t rows = 0;

  bool operator==(const Piece&) const = default;
};

struct Balanced {
  // The pieces of group i are pieces[first_piece[i], first_piece[i + 1]): in order of rows and of
  // ranks, at most one a rank, together all of it.
  std::vector<int64_t> first_piece;
  std::vector<Piece> pieces;
  std::vector<int64_t> load;  // Of each rank, in bytes.
};

// Where holders permit it and rows are small, the busiest rank has at most 1.02 times the mean and
// 1 MiB. Deterministic.
//
// First all sets of holders spread what they hold over their ranks as if it were water, in turn and
// again until nothing moves: that tells the least load that the busiest rank can have (the *fair
// share*). Then groups are given out: those of the narrowest sets first, as others can still even
// out what these leave; of one set those that must stay whole first, then the largest. Each goes to
// the rank with the least load, counting what wider sets are expected to bring; of equal ones to
// the node with the least, then to the lowest rank. What would exceed the fair share there is cut
// among as few ranks as have room for it.
//
// Requires: all loads and groups together are below 2^61 bytes, nothing is negative.
Balanced balance(const BalanceInput& input);

// The files of one rank: for each item which of `count` files, largest first to the smallest file.
// Requires: count > 0.
std::vector<int32_t> balance_files(std::span<const int64_t> nbytes, int64_t count);

}  // namespace torch_ckpt
