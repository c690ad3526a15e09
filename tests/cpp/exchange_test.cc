#include "plan/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "support/status_matchers.h"

namespace torch_ckpt {
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

Exchange share(const std::vector<WantedBytes>& wanted, int64_t budget_nbytes = kBudget,
               std::vector<std::string> nodes = {}) {
  std::vector<const WantedBytes*> all;
  for (const WantedBytes& one : wanted) all.push_back(&one);
  nodes.resize(wanted.size());
  auto exchange = Exchange::make(all, nodes, budget_nbytes);
  EXPECT_OK(exchange);
  return *exchange;
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
  const Exchange exchange = share(wanted, kBudget, {"y", "x", "y", "x"});
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
}  // namespace torch_ckpt
