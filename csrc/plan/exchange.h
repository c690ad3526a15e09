#pragma once

// Exchange: which rank reads what several want, and how it goes round among them.
//
// Every rank says which bytes of which files it wants. Bytes that several want are cut into pieces;
// each is read by one of them, which passes it to the next, and so on around a ring until all have
// it. FastReader asks for all of this between planning and reading;
// engine/exchange/exchange_stream.h carries it out.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "geometry/overlap.h"
#include "plan/wanted_bytes.h"

namespace torch_ckpt {

// Ranks that want the same bytes.
struct ReadRing {
  std::vector<int32_t> ranks;   // In the order in which bytes go round: node by node.
  std::vector<int64_t> shares;  // Bytes that each of them is to read, in proportion.

  bool operator==(const ReadRing&) const = default;
};

// Bytes that the ranks of one ring want.
struct SharedRange {
  int32_t file = 0;
  int32_t ring = 0;
  ByteRange range;

  bool operator==(const SharedRange&) const = default;
};

// What one rank reads for others, has from them, or passes on, one after another.
struct ExchangePiece {
  int32_t file = 0;
  ByteRange range;
  int32_t from = -1;  // The rank that it comes from; -1 where this rank reads it.
  int32_t to = -1;    // The rank that it is passed to; -1 where it is the last.

  bool operator==(const ExchangePiece&) const = default;
};

// The part of an exchange that one rank takes.
struct RankExchange {
  int32_t rank = 0;
  int64_t piece_nbytes = 0;
  std::vector<std::string> files;  // Ascending.
  std::vector<ReadRing> rings;
  std::vector<SharedRange> ranges;  // Ascending by file and where they begin.

  // In the order of files and offsets, which is that of all ranks: so whoever has room for his
  // first piece can go on, and nobody waits in a circle.
  std::vector<ExchangePiece> pieces() const;

  std::vector<std::byte> encode() const;
  static Result<RankExchange> decode(Bytes bytes);
};

// Shares out what the ranks want, as decoded, one after another. `nodes` tells where each rank is;
// `budget_nbytes` bounds what a rank holds of pieces at a time.
//
// Neighbours of less than 256 KiB that different ranks want go round among all of them, rather than
// each alone. Reads are shared out by water: first of the narrowest rings, each to the ranks that
// have least to read, counting what they want alone.
class Exchange {
 public:
  static Result<Exchange> make(std::span<const WantedBytes* const> wanted,
                               std::span<const std::string> nodes, int64_t budget_nbytes);

  // How many bytes need not be read, as another rank has.
  int64_t saved_nbytes() const { return saved_nbytes_; }

  // Of all that the ranks want, each by itself.
  int64_t wanted_nbytes() const { return wanted_nbytes_; }

  // Whether a rank wants anything that another does.
  bool is_in_ring(int32_t rank) const;

  RankExchange of_rank(int32_t rank) const;

 private:
  int64_t piece_nbytes_ = 0;
  int64_t saved_nbytes_ = 0;
  int64_t wanted_nbytes_ = 0;
  std::vector<std::string> files_;
  std::vector<ReadRing> rings_;
  std::vector<SharedRange> ranges_;
};

}  // namespace torch_ckpt
