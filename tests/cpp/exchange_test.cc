#include "plan/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/status_matchers.h"

namespace torch_ckpt::exchange_test {
namespace {

constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kBudget = 256 * kMiB;

WantedBytes wanting(const std::vector<std::pair<std::string, ByteRange>>& ranges) {
  WantedBytes wanted;
  for (const auto& [file, range] : ranges) wanted.add(file, range);
  auto decoded = WantedBytes::decode(wanted.encode());
  EXPECT_OK(decoded);
  return *decoded;
}

Exchange share(const std::vector<WantedBytes>& wanted, ExchangeInput input) {
  for (const WantedBytes& one : wanted) input.wanted.push_back(&one);
  input.nodes.resize(wanted.size());
  auto exchange = Exchange::make(input);
  EXPECT_OK(exchange);
  return *exchange;
}

Exchange share(const std::vector<WantedBytes>& wanted, int64_t budget_nbytes = kBudget) {
  return share(wanted, {.budget_nbytes = budget_nbytes});
}

// Files that a rank reaches; nullopt for all.
using Reach = std::optional<ReachableFiles>;

std::vector<const ReachableFiles*> pointers(const std::vector<Reach>& reachable) {
  std::vector<const ReachableFiles*> out;
  for (const Reach& files : reachable) out.push_back(files ? &*files : nullptr);
  return out;
}

Exchange share_reaching(const std::vector<WantedBytes>& wanted, const std::vector<Reach>& reachable,
                        std::vector<std::string> nodes = {}) {
  return share(
      wanted,
      {.nodes = std::move(nodes), .reachable = pointers(reachable), .budget_nbytes = kBudget});
}

std::vector<RankExchange> parts_of(const Exchange& exchange, size_t ranks) {
  std::vector<RankExchange> parts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    auto part = RankExchange::decode(exchange.of_rank(static_cast<int32_t>(rank)).encode());
    EXPECT_OK(part);
    parts.push_back(*part);
  }
  return parts;
}

// Bytes of each rank's pieces that it reads itself.
std::vector<int64_t> read_nbytes(const std::vector<RankExchange>& parts) {
  std::vector<int64_t> out;
  for (const RankExchange& part : parts) {
    out.push_back(0);
    for (const ExchangePiece& piece : part.pieces()) {
      if (piece.from < 0) out.back() += piece.range.nbytes();
    }
  }
  return out;
}

// That every piece is read once and passed round to all that have it, in the same order everywhere.
void expect_rounds(const std::vector<RankExchange>& parts) {
  using Key = std::tuple<std::string, int64_t, int64_t>;
  std::map<Key, std::map<int32_t, ExchangePiece>> pieces;
  for (const RankExchange& part : parts) {
    Key last;
    for (const ExchangePiece& piece : part.pieces()) {
      const Key key(part.files[static_cast<size_t>(piece.file)], piece.range.begin,
                    piece.range.end);
      ASSERT_LT(last, key) << "rank " << part.rank;
      last = key;
      pieces[key][part.rank] = piece;
    }
  }
  for (const auto& [key, of_ranks] : pieces) {
    ASSERT_GE(of_ranks.size(), 2u);
    int32_t at = -1;
    for (const auto& [rank, piece] : of_ranks) {
      if (piece.from >= 0) continue;
      ASSERT_EQ(at, -1) << "ranks " << at << " and " << rank << " read the same";
      at = rank;
    }
    ASSERT_NE(at, -1);
    size_t met = 1;
    for (int32_t to = of_ranks.at(at).to; to >= 0; ++met) {
      ASSERT_EQ(of_ranks.at(to).from, at);
      at = to;
      to = of_ranks.at(at).to;
    }
    ASSERT_EQ(met, of_ranks.size());
  }
}

TEST(ExchangeTest, ReplicasReadEqualPartsOfAllThatTheyWant) {
  const std::vector<WantedBytes> wanted(4, wanting({{"a", {0, 64 * kMiB}}, {"b", {0, kMiB}}}));
  const Exchange exchange = share(wanted);
  EXPECT_EQ(exchange.saved_nbytes(), 3 * 65 * kMiB);
  const auto parts = parts_of(exchange, 4);
  expect_rounds(parts);
  for (const int64_t nbytes : read_nbytes(parts)) EXPECT_NEAR(nbytes, 65 * kMiB / 4, 4 * kMiB);
}

TEST(ExchangeTest, ARankThatHasAllInItsPageCacheSavesNoReads) {
  std::vector<WantedBytes> wanted(4, wanting({{"a", {0, 64 * kMiB}}}));
  for (WantedBytes& one : std::span(wanted).first(2)) {
    one.set_cached(true);
    one = *WantedBytes::decode(one.encode());
  }
  EXPECT_EQ(share(wanted).saved_nbytes(), 64 * kMiB);
  EXPECT_EQ(share(wanted).wanted_nbytes(), 2 * 64 * kMiB);
  for (WantedBytes& one : wanted) one.set_cached(true);
  EXPECT_EQ(share(wanted).saved_nbytes(), 0);
}

TEST(ExchangeTest, WhoeverReadsMoreAloneReadsLessForOthers) {
  const WantedBytes most = wanting({{"a", {0, 128 * kMiB}}});
  const WantedBytes least = wanting({{"a", {0, 64 * kMiB}}});
  const auto read = read_nbytes(parts_of(share({most, least}), 2));
  EXPECT_EQ(read[0], 0);
  EXPECT_EQ(read[1], 64 * kMiB);
}

TEST(ExchangeTest, WhatOneRankWantsAloneIsNotExchanged) {
  const Exchange exchange = share({wanting({{"a", {0, 10 * kMiB}}}), wanting({{"b", {0, 1}}})});
  EXPECT_EQ(exchange.saved_nbytes(), 0);
  for (const RankExchange& part : parts_of(exchange, 2)) EXPECT_TRUE(part.pieces().empty());
  EXPECT_FALSE(exchange.is_in_ring(0));
}

TEST(ExchangeTest, SmallNeighboursGoRoundTogether) {
  std::vector<WantedBytes> wanted(3);
  for (int64_t block = 0; block < 2; ++block) {
    wanted[static_cast<size_t>(block)].add("a", {block * 64 * kKiB, (block + 2) * 64 * kKiB});
  }
  for (WantedBytes& one : wanted) one = *WantedBytes::decode(one.encode());
  const auto parts = parts_of(share(wanted), 3);
  ASSERT_EQ(parts[0].pieces().size(), 1u);
  EXPECT_EQ(parts[0].pieces()[0].range, (ByteRange{0, 192 * kKiB}));
  EXPECT_TRUE(parts[2].pieces().empty());
}

TEST(ExchangeTest, ColumnShardsOfTheSameRowsAreReadOnce) {
  constexpr int64_t kHalfRow = 2 * kKiB;
  constexpr int64_t kRows = 4 * kMiB;
  std::vector<WantedBytes> wanted;
  for (const int64_t rows : {int64_t{0}, kRows}) {
    wanted.push_back(wanting({{"a", {rows, rows + kRows - kHalfRow}}}));
    wanted.push_back(wanting({{"a", {rows + kHalfRow, rows + kRows}}}));
  }
  const Exchange exchange = share(wanted);
  const auto parts = parts_of(exchange, 4);
  expect_rounds(parts);
  for (size_t rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(parts[rank].ranges.size(), 1u) << rank;
    const int64_t rows = rank < 2 ? 0 : kRows;
    EXPECT_EQ(parts[rank].ranges[0].range, (ByteRange{rows, rows + kRows})) << rank;
  }
}

// A range that all ranks want lies before a tensor of which each rank wants a short slice.
TEST(ExchangeTest, ALongRingDoesNotTakeInOneShortRunAfterAnother) {
  constexpr int64_t kOfAll = 300 * kKiB;
  constexpr int64_t kSlice = 200 * kKiB;
  std::vector<WantedBytes> wanted;
  for (int64_t rank = 0; rank < 64; ++rank) {
    const int64_t begin = kOfAll + rank * kSlice;
    wanted.push_back(wanting({{"a", {0, kOfAll}}, {"a", {begin, begin + kSlice}}}));
  }
  const auto parts = parts_of(share(wanted), wanted.size());
  expect_rounds(parts);
  for (const RankExchange& part : parts) {
    int64_t nbytes = 0;
    for (const SharedRange& shared : part.ranges) nbytes += shared.range.nbytes();
    EXPECT_LE(nbytes, 2 * kOfAll + 2 * kSlice) << part.rank;
  }
}

TEST(ExchangeTest, SmallGapsAreReadWithWhatTheyLieBetween) {
  for (const int64_t gap : {int64_t{1}, 32 * kKiB, 32 * kKiB + 1}) {
    const WantedBytes both = wanting({{"a", {0, kMiB}}, {"a", {kMiB + gap, 2 * kMiB}}});
    const Exchange exchange = share({both, both});
    EXPECT_EQ(exchange.wanted_nbytes(), 2 * (2 * kMiB - gap));
    const std::vector<SharedRange> ranges = parts_of(exchange, 2)[0].ranges;
    ASSERT_EQ(ranges.size(), gap <= 32 * kKiB ? 1 : 2) << gap;
    EXPECT_EQ(ranges.front().range.begin, 0);
    EXPECT_EQ(ranges.back().range.end, 2 * kMiB);
  }
}

TEST(ExchangeTest, RingsGoFromNodeToNodeOnce) {
  const std::vector<WantedBytes> wanted(4, wanting({{"a", {0, kMiB}}}));
  const Exchange exchange =
      share(wanted, {.nodes = {"y", "x", "y", "x"}, .budget_nbytes = kBudget});
  EXPECT_EQ(exchange.of_rank(0).rings[0].ranks, (std::vector<int32_t>{1, 3, 0, 2}));
}

TEST(ExchangeTest, PiecesOfAWideRingAreSmall) {
  const std::vector<WantedBytes> wanted(200, wanting({{"a", {0, 10 * kMiB}}}));
  EXPECT_EQ(share(wanted).of_rank(0).piece_nbytes, 640 * kKiB);
  EXPECT_EQ(share(wanted, 4 * kMiB).of_rank(0).piece_nbytes, 64 * kKiB);
}

TEST(ExchangeTest, RandomWantsAreCoveredOrAlone) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto up_to = [&](int64_t most) {
      return std::uniform_int_distribution<int64_t>(0, most)(random);
    };
    const size_t ranks = 1 + static_cast<size_t>(up_to(6));
    const int64_t blocks = 1 + up_to(60);
    std::vector<WantedBytes> wanted;
    std::map<std::pair<std::string, int64_t>, int> wanters;
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank > 0 && up_to(2) == 0) {
        wanted.push_back(wanted.back());
      } else {
        WantedBytes one;
        for (int64_t i = up_to(8); i > 0; --i) {
          const int64_t begin = up_to(blocks - 1);
          const int64_t end = begin + 1 + up_to(blocks - begin - 1);
          one.add("f" + std::to_string(up_to(2)), {begin * 64 * kKiB, end * 64 * kKiB});
        }
        wanted.push_back(*WantedBytes::decode(one.encode()));
      }
      for (const WantedBytes::File& file : wanted.back().files()) {
        for (const ByteRange& range : file.ranges) {
          for (int64_t at = range.begin; at < range.end; at += 64 * kKiB) {
            ++wanters[{file.name, at}];
          }
        }
      }
    }
    const Exchange exchange = share(wanted, 4 * kMiB);
    const auto parts = parts_of(exchange, ranks);
    expect_rounds(parts);
    int64_t saved = 0;
    for (const auto& [block, count] : wanters) saved += (count - 1) * 64 * kKiB;
    EXPECT_EQ(exchange.saved_nbytes(), saved);
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (const WantedBytes::File& file : wanted[rank].files()) {
        for (const ByteRange& range : file.ranges) {
          for (int64_t at = range.begin; at < range.end; at += 64 * kKiB) {
            const auto pieces = parts[rank].pieces();
            const bool has = std::ranges::any_of(pieces, [&](const ExchangePiece& piece) {
              return parts[rank].files[static_cast<size_t>(piece.file)] == file.name &&
                     piece.range.begin <= at && piece.range.end >= at + 64 * kKiB;
            });
            const int count = wanters[{file.name, at}];
            ASSERT_TRUE(has || count == 1) << "rank " << rank << ", " << file.name << " at " << at;
          }
        }
      }
    }
  }
}

// Ranks that read a byte of the rings of `exchange`.
std::vector<int32_t> readers_of(const Exchange& exchange, size_t ranks) {
  std::vector<int32_t> out;
  const std::vector<int64_t> nbytes = read_nbytes(parts_of(exchange, ranks));
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (nbytes[rank] > 0) out.push_back(static_cast<int32_t>(rank));
  }
  return out;
}

TEST(ExchangeTest, OnlyRanksThatReachAFileReadIt) {
  const std::vector<WantedBytes> wanted(4, wanting({{"a", {0, 64 * kMiB}}, {"b", {0, kMiB}}}));
  const Exchange exchange = share_reaching(
      wanted, {ReachableFiles{"b"}, ReachableFiles{"a"}, std::nullopt, ReachableFiles{}});
  EXPECT_TRUE(exchange.is_necessary());
  EXPECT_EQ(exchange.wanted_nbytes(), 2 * 65 * kMiB);
  EXPECT_EQ(exchange.saved_nbytes(), 65 * kMiB);
  const auto parts = parts_of(exchange, 4);
  expect_rounds(parts);
  for (const RankExchange& part : parts) {
    for (const ExchangePiece& piece : part.pieces()) {
      if (piece.from >= 0) continue;
      const bool is_a = part.files[static_cast<size_t>(piece.file)] == "a";
      EXPECT_TRUE(part.rank == 2 || part.rank == (is_a ? 1 : 0)) << part.rank;
    }
  }
  const std::vector<int64_t> nbytes = read_nbytes(parts);
  EXPECT_NEAR(nbytes[1], 65 * kMiB / 2, 4 * kMiB);
  EXPECT_NEAR(nbytes[2], 65 * kMiB / 2, 4 * kMiB);
}

TEST(ExchangeTest, BytesThatNoneOfTheirRanksReachesHaveAHolder) {
  const WantedBytes own = wanting({{"b", {0, 8 * kMiB}}});
  // Rank 1 wants something alone that it reaches, so rank 2 has less to read.
  const std::vector<WantedBytes> wanted = {wanting({{"a", {5, kMiB}}}), own, WantedBytes(),
                                           WantedBytes()};
  const std::vector<Reach> reachable = {ReachableFiles{}, std::nullopt, std::nullopt, std::nullopt};
  const Exchange exchange = share_reaching(wanted, reachable);
  EXPECT_TRUE(exchange.is_necessary());
  EXPECT_EQ(exchange.wanted_nbytes(), 8 * kMiB);
  EXPECT_EQ(exchange.saved_nbytes(), 0);
  EXPECT_EQ(readers_of(exchange, 4), (std::vector<int32_t>{2}));
  EXPECT_EQ(exchange.of_rank(0).rings[0].ranks, (std::vector<int32_t>{0, 2}));
  EXPECT_TRUE(exchange.is_in_ring(2));
  EXPECT_FALSE(exchange.is_in_ring(1));
  EXPECT_FALSE(exchange.is_in_ring(3));
  // One on the node of a rank that wants the bytes, whatever it has to read.
  EXPECT_EQ(readers_of(share_reaching(wanted, reachable, {"x", "x", "y", "y"}), 4),
            (std::vector<int32_t>{1}));
}

TEST(ExchangeTest, HoldersOfManyFilesReadEquallyMuch) {
  std::vector<WantedBytes> wanted(5);
  for (int i = 0; i < 8; ++i) wanted[0].add("f" + std::to_string(i), {0, kMiB});
  wanted[0] = *WantedBytes::decode(wanted[0].encode());
  std::vector<Reach> reachable(5);
  reachable[0].emplace();
  EXPECT_EQ(read_nbytes(parts_of(share_reaching(wanted, reachable), 5)),
            (std::vector<int64_t>{0, 2 * kMiB, 2 * kMiB, 2 * kMiB, 2 * kMiB}));
}

TEST(ExchangeTest, FilesThatNoRankReachesAreListedWithTheRanksThatWantThem) {
  const WantedBytes both = wanting({{"a", {0, kMiB}}, {"a", {3 * kMiB, 4 * kMiB}}, {"b", {0, 1}}});
  const Reach only_b = ReachableFiles{"b"};
  const Exchange exchange = share_reaching({both, wanting({{"b", {0, 1}}}), both, WantedBytes()},
                                           {only_b, only_b, only_b, only_b});
  EXPECT_TRUE(exchange.is_necessary());
  EXPECT_EQ(exchange.missing(), (std::vector<MissingFile>{{"a", {0, 2}}}));
  EXPECT_TRUE(share({both, both}).missing().empty());
  EXPECT_FALSE(share({both, both}).is_necessary());
}

TEST(ExchangeTest, WhatRanksReachIsReadAloneIfOnlyTheRestIsToBePassedOn) {
  const WantedBytes both = wanting({{"a", {0, 8 * kMiB}}, {"b", {0, 8 * kMiB}}});
  const std::vector<WantedBytes> wanted(3, both);
  const ReachableFiles only_a = {"a"};
  const Exchange exchange = share(
      wanted,
      {.reachable = {&only_a, nullptr, nullptr}, .budget_nbytes = kBudget, .only_necessary = true});
  EXPECT_EQ(exchange.saved_nbytes(), (2 + 1) * 8 * kMiB);
  for (const RankExchange& part : parts_of(exchange, 3)) {
    EXPECT_EQ(part.files, (std::vector<std::string>{"b"}));
  }
  EXPECT_EQ(readers_of(exchange, 3), (std::vector<int32_t>{1, 2}));
  const Exchange none =
      share(wanted, {.reachable = {nullptr, nullptr, nullptr}, .only_necessary = true});
  EXPECT_FALSE(none.is_in_ring(0));
}

TEST(ExchangeTest, ARankWithoutAShareNeverReads) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    RankExchange plan;
    plan.piece_nbytes = 64 * kKiB;
    plan.files = {"a"};
    plan.rings.resize(1);
    ReadRing& ring = plan.rings[0];
    const int64_t sizes[] = {1, 3, kMiB, int64_t{1} << 60};
    for (int32_t rank = 0; rank < 6; ++rank) {
      ring.ranks.push_back(rank);
      ring.shares.push_back(random() % 2 == 0 ? 0 : sizes[random() % 4]);
    }
    plan.ranges = {{0, 0, {0, kMiB}}, {0, 0, {2 * kMiB, 3 * kMiB + 1}}};
    if (std::ranges::max(ring.shares) == 0) {
      EXPECT_FALSE(RankExchange::decode(plan.encode()).ok()) << "no rank reads";
      continue;
    }
    for (int32_t rank = 0; rank < 6; ++rank) {
      plan.rank = rank;
      ASSERT_OK_AND_ASSIGN(const RankExchange part, RankExchange::decode(plan.encode()));
      for (const ExchangePiece& piece : part.pieces()) {
        ASSERT_TRUE(piece.from >= 0 || ring.shares[static_cast<size_t>(rank)] > 0)
            << "seed " << seed << ", rank " << rank;
      }
    }
  }
}

// Compares random plans with what each 64 KiB block needs, found block by block.
TEST(ExchangeTest, WithAnyReachEachRankGetsEachWantedByteOnceFromARankThatReachesIt) {
  constexpr int64_t kBlock = 64 * kKiB;
  using Block = std::pair<std::string, int64_t>;
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto up_to = [&](int64_t most) {
      return std::uniform_int_distribution<int64_t>(0, most)(random);
    };
    const auto ranks = static_cast<size_t>(1 + up_to(6));
    const int64_t blocks = 1 + up_to(40);
    std::vector<WantedBytes> wanted;
    ExchangeInput input = {.budget_nbytes = up_to(1) == 0 ? 4 * kMiB : kBudget,
                           .only_necessary = up_to(3) == 0};
    std::vector<std::set<Block>> wanted_blocks(ranks);
    std::vector<Reach> reachable;
    const int64_t most_reach = up_to(3);  // 0: no rank reaches a file.
    for (size_t rank = 0; rank < ranks; ++rank) {
      WantedBytes one;
      for (int64_t i = up_to(5); i > 0; --i) {
        const int64_t begin = up_to(blocks - 1);
        const int64_t end = begin + 1 + up_to(blocks - begin - 1);
        const std::string file = "f" + std::to_string(up_to(2));
        one.add(file, {begin * kBlock, end * kBlock});
        for (int64_t at = begin; at < end; ++at) wanted_blocks[rank].insert({file, at});
      }
      if (rank > 0 && up_to(2) == 0) {
        one = wanted.back();
        wanted_blocks[rank] = wanted_blocks[rank - 1];
      }
      wanted.push_back(*WantedBytes::decode(one.encode()));
      input.nodes.push_back(std::to_string(up_to(2)));
      Reach& files = reachable.emplace_back();
      if (up_to(4) > 0) {
        files.emplace();
        for (int64_t file = 0; file < 3; ++file) {
          if (up_to(3) < most_reach) files->insert("f" + std::to_string(file));
        }
      }
    }
    const auto reaches = [&](size_t rank, const std::string& file) {
      return !reachable[rank] || reachable[rank]->contains(file);
    };
    for (const WantedBytes& one : wanted) input.wanted.push_back(&one);
    input.reachable = pointers(reachable);
    ASSERT_OK_AND_ASSIGN(const Exchange exchange, Exchange::make(input));
    const auto parts = parts_of(exchange, ranks);
    expect_rounds(parts);

    std::vector<std::map<Block, int>> arrived(ranks);  // How often.
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (const ExchangePiece& piece : parts[rank].pieces()) {
        const std::string& file = parts[rank].files[static_cast<size_t>(piece.file)];
        EXPECT_TRUE(piece.from >= 0 || reaches(rank, file)) << "rank " << rank << ", " << file;
        for (int64_t at = piece.range.begin; at < piece.range.end; at += kBlock) {
          ++arrived[rank][{file, at / kBlock}];
        }
      }
    }
    std::map<std::string, std::set<int32_t>> missing;
    bool is_necessary = false;
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (const Block& block : wanted_blocks[rank]) {
        const bool is_far = !reaches(rank, block.first);
        is_necessary = is_necessary || is_far;
        bool is_missing = true;
        for (size_t any = 0; any < ranks; ++any) {
          if (reaches(any, block.first)) is_missing = false;
        }
        if (is_missing) {
          missing[block.first].insert(static_cast<int32_t>(rank));
          EXPECT_EQ(arrived[rank][block], 0);
        } else {
          // A rank may read alone what it reaches.
          EXPECT_LE(arrived[rank][block], 1);
          EXPECT_TRUE(!is_far || arrived[rank][block] == 1)
              << "rank " << rank << ", " << block.first;
        }
      }
    }
    EXPECT_EQ(exchange.is_necessary(), is_necessary);
    std::vector<MissingFile> expected_missing;
    for (const auto& [file, of] : missing)
      expected_missing.push_back({file, {of.begin(), of.end()}});
    EXPECT_EQ(exchange.missing(), expected_missing);

    // A ring has at most one rank that wants none of its bytes: a holder, which reads all of them.
    for (const RankExchange& part : parts) {
      for (size_t number = 0; number < part.rings.size(); ++number) {
        const ReadRing& ring = part.rings[number];
        std::set<int32_t> wanting;
        bool is_far = false;
        for (const SharedRange& shared : part.ranges) {
          if (shared.ring != static_cast<int32_t>(number)) continue;
          const std::string& file = part.files[static_cast<size_t>(shared.file)];
          for (const int32_t rank : ring.ranks) {
            const auto& of_rank = wanted_blocks[static_cast<size_t>(rank)];
            for (int64_t at = shared.range.begin; at < shared.range.end; at += kBlock) {
              if (!of_rank.contains({file, at / kBlock})) continue;
              wanting.insert(rank);
              is_far = is_far || !reaches(static_cast<size_t>(rank), file);
            }
          }
        }
        EXPECT_TRUE(is_far || !input.only_necessary);
        EXPECT_GE(wanting.size() + 1, ring.ranks.size());
        for (size_t place = 0; place < ring.ranks.size(); ++place) {
          if (wanting.contains(ring.ranks[place])) continue;
          for (size_t other = 0; other < ring.ranks.size(); ++other) {
            EXPECT_EQ(ring.shares[other] > 0, other == place);
          }
        }
      }
    }
  }
}

TEST(ExchangeTest, BytesThatAreDamagedAreRefused) {
  WantedBytes wanted = wanting({{"a", {0, 3 * kMiB}}, {"b", {5, 9}}});
  const std::vector<std::byte> list = wanted.encode();
  const std::vector<std::byte> plan = share({wanted, wanted}).of_rank(1).encode();
  for (const std::vector<std::byte>& sound : {list, plan}) {
    for (size_t i = 0; i < sound.size(); ++i) {
      std::vector<std::byte> damaged = sound;
      damaged[i] ^= std::byte{0x20};
      EXPECT_FALSE(WantedBytes::decode(damaged).ok());
      EXPECT_FALSE(RankExchange::decode(damaged).ok());
      damaged.resize(i);
      EXPECT_FALSE(WantedBytes::decode(damaged).ok());
      EXPECT_FALSE(RankExchange::decode(damaged).ok());
    }
  }
  EXPECT_EQ(RankExchange::decode(plan)->ranges.size(), 2u);
}

}  // namespace
}  // namespace torch_ckpt::exchange_test
