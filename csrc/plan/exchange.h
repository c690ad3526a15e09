#pragma once

// Exchange planning: which rank reads the bytes that several ranks want, and how the bytes travel.
//
// Every rank reports which bytes of which files it wants. Bytes that several ranks want are cut
// into pieces. One rank reads each piece and sends it to the next rank of a ring, until all ranks
// of the ring have it. FastReader requests this plan between planning and reading.
// engine/exchange/exchange_stream.h executes it.
//
// A rank may reach only some of the files, for example if they lie on the local disks of several
// machines. Bytes of a file are read only by ranks that reach it. If no rank of a ring does, the
// ring gets a *holder*: a rank that reaches the file, and reads and sends the bytes without wanting
// them.

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "geometry/overlap.h"
#include "plan/wanted_bytes.h"

namespace torch_ckpt {

// The names of the files that a rank can read.
using ReachableFiles = std::set<std::string, std::less<>>;

// Ranks that want the same bytes, and possibly a holder.
struct ReadRing {
  std::vector<int32_t> ranks;   // In ring order: node by node.
  std::vector<int64_t> shares;  // Relative share of each rank in the reads. 0: reads nothing.

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

// A file that no rank reaches, and the ranks that want bytes of it, ascending.
struct MissingFile {
  std::string name;
  std::vector<int32_t> ranks;

  bool operator==(const MissingFile&) const = default;
};

struct ExchangeInput {
  std::vector<const WantedBytes*> wanted = {};  // The decoded requests of each rank.
  std::vector<std::string> nodes = {};          // Name of each rank's node.
  // For each rank; ranks of one machine may share it. nullptr, or an empty vector: all files.
  std::vector<const ReachableFiles*> reachable = {};
  int64_t budget_nbytes = 0;  // Limits the memory for pieces on one rank.
  // Whether a rank reads alone what it can, so that only bytes that a rank cannot reach are passed
  // on.
  bool only_necessary = false;
};

// Distributes the reads.
//
// Runs of the same ranks are one run if the gap between them is at most 32 KiB; the gap is read as
// well. Adjacent runs below 256 KiB that different ranks want go to one ring of all those ranks. A
// run below 256 KiB also joins the ring of an adjacent longer run, if that ring contains all its
// ranks: two column shards of the same rows, for example, differ in half a row at either end.
// Without this, a rank would read a wanted range a second time if a part of it were in no ring. A
// run joins only if at least half of the joined bytes are wanted by all ranks of the ring.
// Then the reads are balanced. The smallest rings are distributed first, always to the ranks with
// the fewest bytes to read. Bytes that only one rank wants count as its load.
//
// A holder is the rank with the fewest bytes to read, if possible one on the node of a rank that
// wants the bytes. It is chosen for each run, before the reads of other rings are leveled.
class Exchange {
 public:
  static Result<Exchange> make(const ExchangeInput& input);

  // Bytes that are not read from storage, since another rank sends them, although the rank reaches
  // them. A rank that has all that it wants in its page cache reads nothing from storage.
  int64_t saved_nbytes() const { return saved_nbytes_; }

  // Bytes that the ranks would read from storage without the exchange, each rank counted
  // separately. A rank reads no bytes that it does not reach.
  int64_t wanted_nbytes() const { return wanted_nbytes_; }

  // Whether a rank wants bytes of a file that it does not reach.
  bool is_necessary() const { return is_necessary_; }

  // The wanted files that no rank reaches, ascending by name. Their bytes are in no ring.
  const std::vector<MissingFile>& missing() const { return missing_; }

  // Returns whether a rank shares any wanted bytes with another rank, or is a holder.
  bool is_in_ring(int32_t rank) const;

  RankExchange of_rank(int32_t rank) const;

 private:
  int64_t piece_nbytes_ = 0;
  int64_t saved_nbytes_ = 0;
  int64_t wanted_nbytes_ = 0;
  bool is_necessary_ = false;
  std::vector<MissingFile> missing_;
  std::vector<std::string> files_;
  std::vector<ReadRing> rings_;
  std::vector<SharedRange> ranges_;
};

}  // namespace torch_ckpt
