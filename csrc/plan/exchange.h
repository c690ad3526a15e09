#pragma once

// Exchange planning: which rank reads the bytes that several ranks want, and how the bytes travel.
//
// Every rank reports which bytes of which files it wants. Bytes that several ranks want are cut
// into pieces. One rank reads each piece and sends it to the next rank of a ring, until all ranks
// of the ring have it. FastReader requests this plan between planning and reading.
// engine/exchange/exchange_stream.h executes it.

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
  std::vector<int32_t> ranks;   // In ring order: node by node.
  std::vector<int64_t> shares;  // Relative share of each rank in the reads.

  bool operator==(const ReadRing&) const = default;
};

// A byte range that the ranks of one ring want.
struct SharedRange {
  int32_t file = 0;
  int32_t ring = 0;
  ByteRange range;

  bool operator==(const SharedRange&) const = default;
};

// A piece that one rank reads or receives, and sends on.
struct ExchangePiece {
  int32_t file = 0;
  ByteRange range;
  int32_t from = -1;  // Rank to receive the piece from; -1 if this rank reads it.
  int32_t to = -1;    // Rank to send the piece to; -1 for the last rank of the ring.

  bool operator==(const ExchangePiece&) const = default;
};

// One rank's share of an exchange.
struct RankExchange {
  int32_t rank = 0;
  int64_t piece_nbytes = 0;
  std::vector<std::string> files;  // Ascending.
  std::vector<ReadRing> rings;
  std::vector<SharedRange> ranges;  // In ascending order of file and start.

  // Returns the pieces by file and offset. All ranks process pieces in this order, so the rank with
  // the first unfinished piece can always continue: no cyclic wait is possible.
  std::vector<ExchangePiece> pieces() const;

  std::vector<std::byte> encode() const;
  static Result<RankExchange> decode(Bytes bytes);
};

// Distributes the reads. `wanted` has the decoded requests of all ranks, `nodes` the node name of
// each rank. `budget_nbytes` limits the memory for pieces on one rank.
//
// Runs of the same ranks are one run if the gap between them is at most 32 KiB; the gap is read as
// well. Adjacent runs below 256 KiB that different ranks want go to one ring of all those ranks.
// The reads are then leveled like water. The smallest rings are distributed first, always to the
// ranks with the fewest bytes to read. The bytes that only one rank wants count as its load.
class Exchange {
 public:
  static Result<Exchange> make(std::span<const WantedBytes* const> wanted,
                               std::span<const std::string> nodes, int64_t budget_nbytes);

  // Bytes that are not read from storage, since another rank sends them. A rank that has all that
  // it wants in its page cache reads nothing from storage.
  int64_t saved_nbytes() const { return saved_nbytes_; }

  // Bytes that the ranks would read from storage without the exchange, each rank counted
  // separately.
  int64_t wanted_nbytes() const { return wanted_nbytes_; }

  // Returns whether a rank shares any wanted bytes with another rank.
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
