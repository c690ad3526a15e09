#include "plan/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/strided_oracle.h"

namespace torch_ckpt::balance_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

std::vector<int32_t> ranks_from(int32_t first, int32_t count, int32_t step = 1) {
  std::vector<int32_t> ranks;
  for (int32_t i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

BalanceGroup rows_of(int32_t replica_set, int64_t rows, int64_t row_nbytes) {
  return {rows * row_nbytes, replica_set, rows, row_nbytes};
}

int64_t pieces_of(const Balanced& balanced, size_t group) {
  return balanced.first_piece[group + 1] - balanced.first_piece[group];
}

// What the header promises of any result: every row once, by ranks that hold it, loads that add up.
void expect_sound(const BalanceInput& input, const Balanced& balanced) {
  std::vector<int64_t> load = input.load;
  ASSERT_EQ(balanced.first_piece.size(), input.groups.size() + 1);
  for (size_t i = 0; i < input.groups.size(); ++i) {
    const BalanceGroup& group = input.groups[i];
    const auto& replica_set = input.replica_sets[static_cast<size_t>(group.replica_set)];
    const int64_t count = pieces_of(balanced, i);
    ASSERT_GE(count, 1);
    int64_t next_row = 0;
    int32_t last_rank = -1;
    for (int64_t k = 0; k < count; ++k) {
      const Piece& piece = balanced.pieces[static_cast<size_t>(balanced.first_piece[i] + k)];
      ASSERT_TRUE(std::binary_search(replica_set.begin(), replica_set.end(), piece.rank));
      ASSERT_GT(piece.rank, last_rank);
      ASSERT_EQ(piece.first_row, next_row);
      last_rank = piece.rank;
      next_row += piece.rows;
      const int64_t nbytes = count == 1 ? group.nbytes : piece.rows * group.row_nbytes;
      load[static_cast<size_t>(piece.rank)] += nbytes;
      if (count == 1) continue;
      ASSERT_GT(piece.rows, 0);
      ASSERT_GE(group.nbytes, kMinCutNbytes);
      ASSERT_GE(nbytes, std::min(kMinCutNbytes / 2, group.row_nbytes));
    }
    ASSERT_EQ(next_row, group.rows);
  }
  ASSERT_EQ(balanced.load, load);
}

int64_t busiest(const Balanced& balanced) {
  return *std::max_element(balanced.load.begin(), balanced.load.end());
}

double mean(const Balanced& balanced) {
  return static_cast<double>(
             std::accumulate(balanced.load.begin(), balanced.load.end(), int64_t{0})) /
         static_cast<double>(balanced.load.size());
}

void expect_even(const BalanceInput& input, const Balanced& balanced) {
  ASSERT_NO_FATAL_FAILURE(expect_sound(input, balanced));
  EXPECT_LE(static_cast<double>(busiest(balanced)),
            1.02 * mean(balanced) + static_cast<double>(kMiB));
}

// The least load of the busiest rank that any way of sharing out has, bytes cut at will: some set
// of ranks must write all that only its ranks hold. Tries all sets.
double least_busiest(const BalanceInput& input) {
  double least = 0;
  const size_t ranks = input.load.size();
  std::vector<uint32_t> masks;
  for (const auto& replica_set : input.replica_sets) {
    uint32_t mask = 0;
    for (const int32_t rank : replica_set) mask |= uint32_t{1} << rank;
    masks.push_back(mask);
  }
  for (uint32_t set = 1; set < uint32_t{1} << ranks; ++set) {
    int64_t nbytes = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      if ((set >> rank & 1) != 0) nbytes += input.load[rank];
    }
    for (const BalanceGroup& group : input.groups) {
      if ((masks[static_cast<size_t>(group.replica_set)] & ~set) == 0) nbytes += group.nbytes;
    }
    least = std::max(least, static_cast<double>(nbytes) / __builtin_popcount(set));
  }
  return least;
}

BalanceInput random_input(std::mt19937& random, bool cuttable) {
  BalanceInput input;
  const auto ranks = static_cast<int32_t>(1 + pick(random, 8));
  input.ranks_per_node = 1 + pick(random, 4);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    input.load.push_back(pick(random, 3) == 0 ? pick(random, 200 * kMiB) : 0);
  }
  std::set<std::vector<int32_t>> sets;
  for (int64_t i = 0; i <= pick(random, 6); ++i) {
    std::vector<int32_t> set;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      if (pick(random, 2) == 0) set.push_back(rank);
    }
    if (!set.empty()) sets.insert(set);
  }
  if (sets.empty()) sets.insert({0});
  input.replica_sets.assign(sets.begin(), sets.end());
  for (int64_t i = pick(random, 60); i > 0; --i) {
    const auto set = static_cast<int32_t>(pick(random, std::ssize(input.replica_sets)));
    const int64_t scale = pick(random, 10) == 0 ? 500 * kMiB : 10 * kMiB;
    const int64_t row_nbytes = 1 + pick(random, 8192);
    const int64_t rows = 2 + pick(random, scale) / row_nbytes;
    input.groups.push_back(rows_of(set, rows, row_nbytes));
    if (!cuttable && pick(random, 3) == 0) input.groups.back().rows = pick(random, 2);
    if (!cuttable && pick(random, 4) == 0) {
      input.groups.back() = rows_of(set, 2 + pick(random, 9), pick(random, 20 * kMiB));
    }
  }
  return input;
}

TEST(BalanceTest, RandomGroupsComeNearTheLeastThatHoldersPermit) {
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const BalanceInput input = random_input(random, true);
    const Balanced balanced = balance(input);
    ASSERT_NO_FATAL_FAILURE(expect_sound(input, balanced));
    ASSERT_LE(static_cast<double>(busiest(balanced)),
              1.02 * least_busiest(input) + static_cast<double>(kMiB));
  }
}

TEST(BalanceTest, WhatCannotBeCutIsWrittenWholeAndTheResultIsAlwaysTheSame) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const BalanceInput input = random_input(random, false);
    const Balanced balanced = balance(input);
    ASSERT_NO_FATAL_FAILURE(expect_sound(input, balanced));
    for (size_t i = 0; i < input.groups.size(); ++i) {
      ASSERT_TRUE(input.groups[i].rows > 1 || pieces_of(balanced, i) == 1);
    }
    const Balanced again = balance(input);
    ASSERT_EQ(again.pieces, balanced.pieces);
    ASSERT_EQ(again.first_piece, balanced.first_piece);
  }
}

TEST(BalanceTest, NothingToShareLeavesLoadsAsTheyAre) {
  const Balanced balanced =
      balance({.ranks_per_node = 8, .load = {5, 0, 7}, .replica_sets = {}, .groups = {}});
  EXPECT_TRUE(balanced.pieces.empty());
  EXPECT_EQ(balanced.load, (std::vector<int64_t>{5, 0, 7}));
  EXPECT_EQ(balance({}).first_piece, std::vector<int64_t>{0});
}

// DDP: everything everywhere, one tensor with 60 % of all bytes. Only that one needs to be cut.
TEST(BalanceTest, OneHugeReplicatedTensorIsCutAndTheRestStaysWhole) {
  BalanceInput input = {.ranks_per_node = 8,
                        .load = std::vector<int64_t>(16),
                        .replica_sets = {ranks_from(0, 16)},
                        .groups = {}};
  for (int i = 0; i < 400; ++i) input.groups.push_back(rows_of(0, 1024, 4096));
  input.groups.push_back(rows_of(0, 600 * 1024, 4096));
  const Balanced balanced = balance(input);
  ASSERT_NO_FATAL_FAILURE(expect_even(input, balanced));
  EXPECT_EQ(pieces_of(balanced, 400), 10);
  EXPECT_LE(balanced.pieces.size(), 400u + 10u);
}

TEST(BalanceTest, ReplicasOfShardsAreSharedOutWithinTheirColumns) {
  BalanceInput input = {
      .ranks_per_node = 8, .load = std::vector<int64_t>(32), .replica_sets = {}, .groups = {}};
  for (int32_t column = 0; column < 8; ++column) {
    input.replica_sets.push_back(ranks_from(column, 4, 8));
    for (int i = 0; i < 100; ++i) input.groups.push_back(rows_of(column, 100 + 7 * i, 16384));
  }
  const Balanced balanced = balance(input);
  ASSERT_NO_FATAL_FAILURE(expect_even(input, balanced));
  EXPECT_LE(balanced.pieces.size(), input.groups.size() + 8);
}

// FSDP and TP: unique shards everywhere, norms replicated among the ranks of a TP group.
TEST(BalanceTest, ReplicatedNormsFillUpWhatUniqueShardsLeave) {
  std::mt19937 random(7);
  BalanceInput input = {.ranks_per_node = 8, .load = {}, .replica_sets = {}, .groups = {}};
  for (int32_t rank = 0; rank < 32; ++rank) input.load.push_back(100 * kMiB + pick(random, kMiB));
  for (int32_t first = 0; first < 32; first += 4) {
    input.replica_sets.push_back(ranks_from(first, 4));
    for (int i = 0; i < 200; ++i) {
      input.groups.push_back(rows_of(static_cast<int32_t>(input.replica_sets.size() - 1), 4096, 2));
    }
  }
  const Balanced balanced = balance(input);
  ASSERT_NO_FATAL_FAILURE(expect_even(input, balanced));
  EXPECT_EQ(balanced.pieces.size(), input.groups.size());
}

// MoE: experts on one rank or on two, of very different sizes; dense parts everywhere, which even
// out what experts leave.
TEST(BalanceTest, DensePartsEvenOutWhatExpertsLeave) {
  std::mt19937 random(11);
  BalanceInput input = {
      .ranks_per_node = 4, .load = {}, .replica_sets = {ranks_from(0, 16)}, .groups = {}};
  for (int32_t rank = 0; rank < 16; ++rank) input.load.push_back(pick(random, 300 * kMiB));
  for (int32_t rank = 0; rank < 8; ++rank) {
    input.replica_sets.push_back({rank, rank + 8});
    for (int i = 0; i < 8; ++i) {
      input.groups.push_back(rows_of(rank + 1, 2 + pick(random, 4096), 8192));
    }
  }
  for (int i = 0; i < 200; ++i) input.groups.push_back(rows_of(0, 5120, 4096));
  const Balanced balanced = balance(input);
  ASSERT_NO_FATAL_FAILURE(expect_even(input, balanced));
  EXPECT_LE(balanced.pieces.size(), input.groups.size() + 32);
}

TEST(BalanceTest, ThousandsOfSmallTensorsAreSharedOutUncut) {
  std::mt19937 random(3);
  BalanceInput input = {.ranks_per_node = 8,
                        .load = std::vector<int64_t>(64),
                        .replica_sets = {ranks_from(0, 64)},
                        .groups = {}};
  for (int i = 0; i < 20000; ++i) input.groups.push_back(rows_of(0, 2 + pick(random, 64), 128));
  const Balanced balanced = balance(input);
  ASSERT_NO_FATAL_FAILURE(expect_even(input, balanced));
  EXPECT_EQ(balanced.pieces.size(), input.groups.size());
}

TEST(BalanceTest, AChainOfOverlappingSetsEvensOutEndToEnd) {
  BalanceInput input = {
      .ranks_per_node = 8, .load = std::vector<int64_t>(9), .replica_sets = {}, .groups = {}};
  for (int32_t rank = 0; rank < 8; ++rank) input.replica_sets.push_back({rank, rank + 1});
  input.groups = {rows_of(0, 100000, 4096)};
  for (int32_t i = 1; i < 8; ++i) input.groups.push_back(rows_of(i, 10000, 4096));
  const Balanced balanced = balance(input);
  ASSERT_NO_FATAL_FAILURE(expect_sound(input, balanced));
  EXPECT_LE(static_cast<double>(busiest(balanced)),
            1.02 * least_busiest(input) + static_cast<double>(kMiB));
}

TEST(BalanceTest, TiesGoToTheNodeWithTheLeastLoadAndThenToTheLowestRank) {
  BalanceInput input = {.ranks_per_node = 2,
                        .load = {0, 10, 0, 0},
                        .replica_sets = {ranks_from(0, 4)},
                        .groups = {{100, 0}, {100, 0}, {100, 0}}};
  const Balanced balanced = balance(input);
  const std::vector<Piece> expected = {{2, 0, 0}, {0, 0, 0}, {3, 0, 0}};
  EXPECT_EQ(balanced.pieces, expected);
}

TEST(BalanceTest, NothingIsCutThatTheBusiestRankOutlasts) {
  BalanceInput input = {.ranks_per_node = 1,
                        .load = {1000 * kMiB, 0, 0},
                        .replica_sets = {{1, 2}},
                        .groups = {rows_of(0, 900, kMiB), {1000 * kMiB, 0}}};
  EXPECT_EQ(balance(input).pieces.size(), 2u);
}

TEST(BalanceTest, LargeRowsAreSharedOutOneByOne) {
  BalanceInput input = {.ranks_per_node = 8,
                        .load = {1, 0, 0, 5, 0, 0, 0, 2},
                        .replica_sets = {ranks_from(0, 8)},
                        .groups = {rows_of(0, 8, 32 * kMiB)}};
  const Balanced balanced = balance(input);
  ASSERT_NO_FATAL_FAILURE(expect_sound(input, balanced));
  EXPECT_EQ(balanced.pieces.size(), 8u);
}

TEST(BalanceFilesTest, TheLargestGoesToTheSmallestFile) {
  const std::vector<int64_t> nbytes = {1, 7, 3, 3, 2, 0, 0};
  EXPECT_EQ(balance_files(nbytes, 2), (std::vector<int32_t>{0, 0, 1, 1, 1, 0, 0}));
  EXPECT_EQ(balance_files(nbytes, 1), std::vector<int32_t>(7, 0));
  EXPECT_TRUE(balance_files({}, 3).empty());
}

TEST(BalanceFilesTest, NoFileIsLargerThanTheMeanAndTheLargestItem) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<int64_t> nbytes(static_cast<size_t>(pick(random, 100)));
    for (int64_t& value : nbytes) value = pick(random, 1000);
    const int64_t count = 1 + pick(random, 9);
    const std::vector<int32_t> files = balance_files(nbytes, count);
    std::vector<int64_t> load(static_cast<size_t>(count));
    for (size_t i = 0; i < nbytes.size(); ++i) load[static_cast<size_t>(files[i])] += nbytes[i];
    const int64_t total = std::accumulate(nbytes.begin(), nbytes.end(), int64_t{0});
    const int64_t largest = nbytes.empty() ? 0 : *std::max_element(nbytes.begin(), nbytes.end());
    ASSERT_LE(*std::max_element(load.begin(), load.end()), total / count + largest);
  }
}

}  // namespace
}  // namespace torch_ckpt::balance_test
