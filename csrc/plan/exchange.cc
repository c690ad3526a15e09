#include "plan/exchange.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>
#include <utility>

#include "plan/wire.h"

namespace torch_ckpt {
namespace {

constexpr uint32_t kExchangeVersion = 1;
constexpr std::string_view kExchangeMagic = "TCXP";

// Adjacent runs below this size are merged: a separate ring would cost more than it saves.
constexpr int64_t kSmallNbytes = int64_t{256} << 10;

// Runs of the same ranks with at most this gap are read as one: a request would cost more.
constexpr int64_t kMaxGap = int64_t{32} << 10;

// Pieces start and end at multiples of this: whole checksum blocks of a data file.
constexpr int64_t kGrain = int64_t{64} << 10;
constexpr int64_t kMaxPieceNbytes = int64_t{4} << 20;

// The memory budget has room for at least this many pieces.
constexpr int64_t kMinPiecesInFlight = 16;

constexpr int64_t kMaxReadOffset = int64_t{1} << 61;

__extension__ using Wide = __int128;  // Product of two sizes.

using Requesters = std::vector<int32_t>;  // Ascending numbers of groups of ranks.

// A byte range of a file with one set of requesters.
struct ReadRun {
  ByteRange range;
  Requesters requesters;
  int64_t extra_nbytes = 0;  // Bytes that some of the requesters do not want.
};

Requesters united(const Requesters& a, const Requesters& b) {
  Requesters out;
  std::ranges::set_union(a, b, std::back_inserter(out));
  return out;
}

// Cuts one file wherever the set of requesters changes.
std::vector<ReadRun> cut_by_requesters(
    const std::vector<std::pair<int32_t, const std::vector<ByteRange>*>>& wanted) {
  struct Change {
    int64_t at;
    int32_t requester;
    bool begins;
  };
  std::vector<Change> changes;
  for (const auto& [requester, ranges] : wanted) {
    for (const ByteRange& range : *ranges) {
      changes.push_back({range.begin, requester, true});
      changes.push_back({range.end, requester, false});
    }
  }
  std::ranges::sort(changes, {}, &Change::at);
  std::vector<ReadRun> runs;
  Requesters now;
  for (size_t i = 0; i < changes.size();) {
    const int64_t at = changes[i].at;
    for (; i < changes.size() && changes[i].at == at; ++i) {
      const auto place = std::ranges::lower_bound(now, changes[i].requester);
      if (changes[i].begins) {
        now.insert(place, changes[i].requester);
      } else {
        now.erase(place);
      }
    }
    if (i < changes.size() && !now.empty()) runs.push_back({{at, changes[i].at}, now, 0});
  }
  return runs;
}

// Returns two adjacent runs as one.
ReadRun united(const ReadRun& a, const ReadRun& b) {
  ReadRun out{{a.range.begin, b.range.end}, united(a.requesters, b.requesters), 0};
  for (const ReadRun* run : {&a, &b}) {
    const bool is_of_all = run->requesters == out.requesters;
    out.extra_nbytes += is_of_all ? run->extra_nbytes : run->range.nbytes();
  }
  return out;
}

// Whether adjacent runs are better read by one ring. If one is long, the other must be short, and
// its requesters must be in the ring anyway. At most half of the bytes may then be useless to some
// ranks: otherwise a ring of all ranks would absorb one short run after another.
bool are_one(const ReadRun& a, const ReadRun& b) {
  const bool a_is_small = a.range.nbytes() < kSmallNbytes;
  const bool b_is_small = b.range.nbytes() < kSmallNbytes;
  if (a_is_small && b_is_small) return true;
  const bool is_included = (a_is_small && std::ranges::includes(b.requesters, a.requesters)) ||
                           (b_is_small && std::ranges::includes(a.requesters, b.requesters));
  if (!is_included) return false;
  const ReadRun both = united(a, b);
  return 2 * both.extra_nbytes <= both.range.nbytes();
}

// Merges adjacent runs that are better read by one ring, and runs of the same requesters with a
// small gap.
std::vector<ReadRun> joined(std::vector<ReadRun> runs) {
  std::vector<ReadRun> out;
  for (ReadRun& run : runs) {
    if (!out.empty()) {
      ReadRun& last = out.back();
      const int64_t gap = run.range.begin - last.range.end;
      if ((gap <= kMaxGap && last.requesters == run.requesters) ||
          (gap == 0 && are_one(last, run))) {
        last = united(last, run);
        continue;
      }
    }
    out.push_back(std::move(run));
  }
  return out;
}

// Levels the loads like water: adds `nbytes` to the least loaded ranks. Returns the bytes that each
// rank got.
std::vector<int64_t> pour(int64_t nbytes, const std::vector<int32_t>& ranks,
                          std::vector<int64_t>* load) {
  std::vector<int64_t> levels;
  levels.reserve(ranks.size());
  for (const int32_t rank : ranks) levels.push_back((*load)[static_cast<size_t>(rank)]);
  std::ranges::sort(levels);
  int64_t below = 0;  // Sum of the loads below the water level.
  int64_t level = 0;
  for (size_t i = 0; i < levels.size(); ++i) {
    below += levels[i];
    const auto count = static_cast<int64_t>(i) + 1;
    level = (below + nbytes + count - 1) / count;
    if (i + 1 == levels.size() || level <= levels[i + 1]) break;
  }
  std::vector<int64_t> out;
  for (const int32_t rank : ranks) {
    int64_t& rank_load = (*load)[static_cast<size_t>(rank)];
    const int64_t poured = std::max<int64_t>(level - rank_load, 0);
    rank_load += poured;
    out.push_back(poured);
  }
  return out;
}

// Selects the reader of each piece of a ring: the rank that is furthest behind its share. Never
// selects a rank without a share, since the ranks are behind by a positive sum.
// Requires: a share is positive.
class ReaderSelector {
 public:
  explicit ReaderSelector(const ReadRing& ring)
      : shares_(ring.shares),
        total_(std::accumulate(ring.shares.begin(), ring.shares.end(), Wide{0})),
        read_(ring.shares.size(), 0) {}

  // Returns the ring position of the rank that reads the next `nbytes`. Same result on every rank.
  size_t next(int64_t nbytes) {
    all_read_ += nbytes;
    size_t behind = 0;
    Wide most = 0;
    for (size_t i = 0; i < shares_.size(); ++i) {
      // Due bytes minus read bytes, times the sum of all shares.
      const Wide lacks = Wide{shares_[i]} * all_read_ - total_ * read_[i];
      if (i == 0 || lacks > most) {
        behind = i;
        most = lacks;
      }
    }
    read_[behind] += nbytes;
    return behind;
  }

 private:
  const std::vector<int64_t> shares_;
  const Wide total_;
  std::vector<int64_t> read_;
  int64_t all_read_ = 0;
};

}  // namespace

std::vector<ExchangePiece> RankExchange::pieces() const {
  std::vector<ReaderSelector> selectors(rings.begin(), rings.end());
  std::vector<int64_t> places;  // Position of this rank in each ring.
  for (const ReadRing& ring : rings) {
    places.push_back(std::ranges::find(ring.ranks, rank) - ring.ranks.begin());
  }
  std::vector<ExchangePiece> out;
  for (const SharedRange& shared : ranges) {
    const auto number = static_cast<size_t>(shared.ring);
    const std::vector<int32_t>& ranks = rings[number].ranks;
    const auto count = ranks.size();
    const auto place = static_cast<size_t>(places[number]);
    for (int64_t begin = shared.range.begin; begin < shared.range.end;) {
      const int64_t end =
          std::min(shared.range.end, align_down(begin, piece_nbytes) + piece_nbytes);
      const size_t reader = selectors[number].next(end - begin);
      ExchangePiece piece{.file = shared.file, .range = {begin, end}};
      if (place != reader) piece.from = ranks[(place + count - 1) % count];
      if ((place + 1) % count != reader) piece.to = ranks[(place + 1) % count];
      out.push_back(piece);
      begin = end;
    }
  }
  return out;
}

std::vector<std::byte> RankExchange::encode() const {
  WireWriter out;
  out.varint(rank);
  out.varint(piece_nbytes);
  out.varint(std::ssize(files));
  for (const std::string& file : files) out.word(file);
  out.varint(std::ssize(rings));
  for (const ReadRing& ring : rings) {
    out.varint(std::ssize(ring.ranks));
    for (size_t i = 0; i < ring.ranks.size(); ++i) {
      out.varint(ring.ranks[i]);
      out.varint(ring.shares[i]);
    }
  }
  out.varint(std::ssize(ranges));
  SharedRange last;
  for (const SharedRange& range : ranges) {
    if (range.file != last.file) last.range.end = 0;
    out.varint(range.file - last.file);
    out.varint(range.ring);
    out.varint(range.range.begin - last.range.end);
    out.varint(range.range.nbytes());
    last = range;
  }
  return out.finish(kExchangeMagic, kExchangeVersion);
}

Result<RankExchange> RankExchange::decode(Bytes bytes) {
  ASSIGN_OR_RETURN(const Bytes body,
                   open_wire(bytes, kExchangeMagic, kExchangeVersion, "an exchange"));
  WireReader in(body);
  RankExchange out;
  const auto unsound = [] { return corruption("an exchange is unsound"); };
  constexpr int64_t kMaxRank = int64_t{1} << 30;
  int64_t rank;
  int64_t count;
  if (!in.varint(&rank) || rank > kMaxRank || !in.varint(&out.piece_nbytes)) return unsound();
  if (out.piece_nbytes <= 0 || out.piece_nbytes > kMaxPieceNbytes) return unsound();
  if (out.piece_nbytes % kGrain != 0) return unsound();
  out.rank = static_cast<int32_t>(rank);
  if (!in.varint(&count) || count > in.left()) return unsound();
  for (int64_t i = 0; i < count; ++i) {
    std::string_view name;
    if (!in.word(&name) || (i > 0 && out.files.back() >= name)) return unsound();
    out.files.emplace_back(name);
  }
  if (!in.varint(&count) || count > in.left()) return unsound();
  for (int64_t i = 0; i < count; ++i) {
    ReadRing ring;
    int64_t ranks;
    if (!in.varint(&ranks) || ranks < 2 || ranks > in.left()) return unsound();
    for (int64_t r = 0; r < ranks; ++r) {
      int64_t share;
      if (!in.varint(&rank) || rank > kMaxRank || !in.varint(&share) || share > kMaxReadOffset) {
        return unsound();
      }
      ring.ranks.push_back(static_cast<int32_t>(rank));
      ring.shares.push_back(share);
    }
    if (std::ranges::count(ring.ranks, out.rank) != 1) return unsound();
    if (std::ranges::max(ring.shares) == 0) return unsound();  // No rank would read.
    out.rings.push_back(std::move(ring));
  }
  if (!in.varint(&count) || count > in.left()) return unsound();
  int64_t file = 0;
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t files;
    int64_t ring;
    int64_t gap;
    int64_t nbytes;
    if (!in.varint(&files) || !in.varint(&ring) || !in.varint(&gap) || !in.varint(&nbytes)) {
      return unsound();
    }
    if (files >= std::ssize(out.files) - file || ring >= std::ssize(out.rings)) return unsound();
    if (files > 0) at = 0;
    file += files;
    if (nbytes == 0 || gap > kMaxReadOffset - at || nbytes > kMaxReadOffset - at - gap)
      return unsound();
    out.ranges.push_back(
        {static_cast<int32_t>(file), static_cast<int32_t>(ring), {at + gap, at + gap + nbytes}});
    at += gap + nbytes;
  }
  if (in.left() != 0) return unsound();
  return out;
}

namespace {

// The ranks of a load. Ranks with equal requests and equal reach form one group, so a thousand
// equal ranks cost no more than one.
class Ranks {
 public:
  using Requests = std::vector<std::pair<int32_t, const std::vector<ByteRange>*>>;

  explicit Ranks(const ExchangeInput& input) : nodes_(input.nodes), load_(input.wanted.size(), 0) {
    std::map<const ReachableFiles*, int32_t, decltype(&is_less_reach)> reaches(&is_less_reach);
    std::map<std::pair<const Files*, int32_t>, int32_t, decltype(&is_less)> groups(&is_less);
    for (size_t rank = 0; rank < input.wanted.size(); ++rank) {
      const ReachableFiles* reachable = input.reachable.empty() ? nullptr : input.reachable[rank];
      const int32_t reach =
          reaches.emplace(reachable, static_cast<int32_t>(reaches.size())).first->second;
      const Files& of_rank = input.wanted[rank]->files();
      const auto [found, is_new] =
          groups.emplace(std::pair(&of_rank, reach), static_cast<int32_t>(groups_.size()));
      if (is_new) {
        groups_.push_back({{}, reachable});
        for (const auto& file : of_rank)
          files_[file.name].emplace_back(found->second, &file.ranges);
      }
      groups_[static_cast<size_t>(found->second)].ranks.push_back(static_cast<int32_t>(rank));
    }
  }

  // The requests of each file: groups and their ranges.
  const std::map<std::string_view, Requests>& files() const { return files_; }

  std::vector<int32_t> ranks_of(const Requesters& requesters) const {
    std::vector<int32_t> out;
    for (const int32_t group : requesters) {
      const auto& some = groups_[static_cast<size_t>(group)].ranks;
      out.insert(out.end(), some.begin(), some.end());
    }
    return out;
  }

  bool reaches(int32_t group, std::string_view file) const {
    const ReachableFiles* reachable = groups_[static_cast<size_t>(group)].reachable;
    return reachable == nullptr || reachable->contains(file);
  }

  // Returns the groups of `requesters` that reach a file.
  Requesters reaching(const Requesters& requesters, std::string_view file) const {
    Requesters out;
    std::ranges::copy_if(requesters, std::back_inserter(out),
                         [&](int32_t group) { return reaches(group, file); });
    return out;
  }

  // Returns all ranks that reach a file.
  std::vector<int32_t> ranks_reaching(std::string_view file) const {
    Requesters all(groups_.size());
    std::iota(all.begin(), all.end(), 0);
    return ranks_of(reaching(all, file));
  }

  // Returns the rank of `candidates` that reads for `ranks`. Requires: there is a candidate.
  int32_t holder(const std::vector<int32_t>& candidates, const std::vector<int32_t>& ranks) const {
    std::set<std::string_view> nodes;
    for (const int32_t rank : ranks) nodes.insert(node_of(rank));
    return *std::ranges::min_element(candidates, {}, [&](int32_t rank) {
      return std::tuple(!nodes.contains(node_of(rank)), load_[static_cast<size_t>(rank)], rank);
    });
  }

  std::string_view node_of(int32_t rank) const { return nodes_[static_cast<size_t>(rank)]; }

  // The bytes that each rank has to read so far.
  std::vector<int64_t>& load() { return load_; }

  void add_load(int32_t rank, int64_t nbytes) { load_[static_cast<size_t>(rank)] += nbytes; }

 private:
  using Files = std::vector<WantedBytes::File>;
  struct Group {
    std::vector<int32_t> ranks;
    const ReachableFiles* reachable;  // nullptr: all files.
  };

  static bool is_less_reach(const ReachableFiles* a, const ReachableFiles* b) {
    if (a == b || a == nullptr || b == nullptr) return a == nullptr && b != nullptr;
    return *a < *b;
  }

  static bool is_less(const std::pair<const Files*, int32_t>& a,
                      const std::pair<const Files*, int32_t>& b) {
    if (a.second != b.second) return a.second < b.second;
    const auto ends = [](const ByteRange& r) { return std::pair(r.begin, r.end); };
    return std::ranges::lexicographical_compare(
        *a.first, *b.first, [&](const auto& x, const auto& y) {
          if (x.name != y.name) return x.name < y.name;
          return std::ranges::lexicographical_compare(x.ranges, y.ranges, {}, ends, ends);
        });
  }

  const std::vector<std::string>& nodes_;
  std::vector<Group> groups_;
  std::map<std::string_view, Requests> files_;
  std::vector<int64_t> load_;
};

// A run that is passed on.
struct SharedRun {
  std::string_view file;
  ReadRun run;
  Requesters readers;  // The requesters that reach the file.
};

struct Rings {
  std::vector<MissingFile> missing;
  std::vector<std::string> files;
  std::vector<ReadRing> rings;
  std::vector<SharedRange> ranges;
};

// Makes the rings of all runs, which ascend by file and start, and levels the reads of `ranks`.
Rings make_rings(const std::vector<SharedRun>& runs, Ranks& ranks) {
  Rings out;
  // Requesters, those of them that read, and the holder or -1.
  std::map<std::tuple<Requesters, Requesters, int32_t>, int32_t> ring_of;
  struct Reads {
    std::vector<int32_t> readers;
    int64_t nbytes = 0;
    bool by_holder = false;
  };
  std::vector<Reads> reads;  // By ring.
  std::string_view file_of_holders;
  std::vector<int32_t> holders;
  for (const SharedRun& shared : runs) {
    const auto& [range, requesters, _] = shared.run;
    int32_t holder = -1;
    if (shared.readers.empty()) {
      if (file_of_holders != shared.file || holders.empty()) {
        file_of_holders = shared.file;
        holders = ranks.ranks_reaching(shared.file);
      }
      if (holders.empty()) {
        if (out.missing.empty() || out.missing.back().name != shared.file) {
          out.missing.push_back({std::string(shared.file), {}});
        }
        std::vector<int32_t>& wanting = out.missing.back().ranks;
        for (const int32_t rank : ranks.ranks_of(requesters)) wanting.push_back(rank);
        std::ranges::sort(wanting);
        wanting.erase(std::unique(wanting.begin(), wanting.end()), wanting.end());
        continue;
      }
      holder = ranks.holder(holders, ranks.ranks_of(requesters));
      ranks.add_load(holder, range.nbytes());
    }
    const auto [ring, is_new] = ring_of.emplace(std::tuple(requesters, shared.readers, holder),
                                                static_cast<int32_t>(out.rings.size()));
    if (is_new) {
      std::vector<int32_t> of_ring = ranks.ranks_of(requesters);
      if (holder >= 0) of_ring.push_back(holder);
      std::ranges::sort(of_ring, {},
                        [&](int32_t rank) { return std::pair(ranks.node_of(rank), rank); });
      std::vector<int32_t> readers =
          holder >= 0 ? std::vector{holder} : ranks.ranks_of(shared.readers);
      out.rings.push_back({std::move(of_ring), {}});
      reads.push_back({.readers = std::move(readers), .by_holder = holder >= 0});
    }
    if (out.files.empty() || out.files.back() != shared.file) out.files.emplace_back(shared.file);
    reads[static_cast<size_t>(ring->second)].nbytes += range.nbytes();
    out.ranges.push_back({static_cast<int32_t>(out.files.size()) - 1, ring->second, range});
  }

  std::vector<size_t> order(out.rings.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t ring) { return reads[ring].readers.size(); });
  for (const size_t number : order) {
    ReadRing& ring = out.rings[number];
    const auto& [readers, nbytes, by_holder] = reads[number];
    const std::vector<int64_t> poured =
        by_holder ? std::vector{nbytes} : pour(nbytes, readers, &ranks.load());
    ring.shares.assign(ring.ranks.size(), 0);
    for (size_t i = 0; i < readers.size(); ++i) {
      const auto place = std::ranges::find(ring.ranks, readers[i]) - ring.ranks.begin();
      ring.shares[static_cast<size_t>(place)] = poured[i];
    }
  }
  return out;
}

}  // namespace

Result<Exchange> Exchange::make(const ExchangeInput& input) {
  const size_t count = input.wanted.size();
  if (input.nodes.size() != count) {
    return invalid_argument(count, " ranks are on ", input.nodes.size(), " nodes");
  }
  if (!input.reachable.empty() && input.reachable.size() != count) {
    return invalid_argument(input.reachable.size(), " of ", count, " ranks reach files");
  }
  Exchange out;
  Ranks ranks(input);
  std::vector<SharedRun> shared;
  for (const auto& [name, requests] : ranks.files()) {
    std::vector<ReadRun> runs = cut_by_requesters(requests);
    for (const ReadRun& run : runs) {
      const Requesters reaching = ranks.reaching(run.requesters, name);
      if (reaching.size() < run.requesters.size()) out.is_necessary_ = true;
      const std::vector<int32_t> readers = ranks.ranks_of(reaching);
      const int64_t uncached = std::ranges::count_if(readers, [&](int32_t rank) {
        return !input.wanted[static_cast<size_t>(rank)]->is_cached();
      });
      out.wanted_nbytes_ += run.range.nbytes() * uncached;
      out.saved_nbytes_ += run.range.nbytes() * std::max<int64_t>(uncached - 1, 0);
    }
    if (input.only_necessary) {
      std::erase_if(runs, [&, &name = name](const ReadRun& run) {
        if (ranks.reaching(run.requesters, name).size() < run.requesters.size()) return false;
        for (const int32_t rank : ranks.ranks_of(run.requesters)) {
          ranks.add_load(rank, run.range.nbytes());
        }
        return true;
      });
    }
    for (ReadRun& run : joined(std::move(runs))) {
      Requesters readers = ranks.reaching(run.requesters, name);
      const std::vector<int32_t> alone = ranks.ranks_of(run.requesters);
      if (alone.size() == 1 && !readers.empty()) {
        ranks.add_load(alone.front(), run.range.nbytes());
      } else {
        shared.push_back({name, std::move(run), std::move(readers)});
      }
    }
  }
  Rings rings = make_rings(shared, ranks);
  out.missing_ = std::move(rings.missing);
  out.files_ = std::move(rings.files);
  out.rings_ = std::move(rings.rings);
  out.ranges_ = std::move(rings.ranges);
  // A piece passes through all ranks of its ring, so the budget must have room for two pieces per
  // rank of the widest ring.
  size_t widest = 2;
  for (const ReadRing& ring : out.rings_) widest = std::max(widest, ring.ranks.size());
  const int64_t piece_count =
      std::max<int64_t>(2 * static_cast<int64_t>(widest), kMinPiecesInFlight);
  out.piece_nbytes_ =
      std::clamp(align_down(input.budget_nbytes / piece_count, kGrain), kGrain, kMaxPieceNbytes);
  return out;
}

bool Exchange::is_in_ring(int32_t rank) const {
  return std::ranges::any_of(rings_, [&](const ReadRing& ring) {
    return std::ranges::find(ring.ranks, rank) != ring.ranks.end();
  });
}

RankExchange Exchange::of_rank(int32_t rank) const {
  RankExchange out{
      .rank = rank, .piece_nbytes = piece_nbytes_, .files = {}, .rings = {}, .ranges = {}};
  std::vector<int32_t> new_ring(rings_.size(), -1);
  for (size_t i = 0; i < rings_.size(); ++i) {
    if (std::ranges::find(rings_[i].ranks, rank) == rings_[i].ranks.end()) continue;
    new_ring[i] = static_cast<int32_t>(out.rings.size());
    out.rings.push_back(rings_[i]);
  }
  int32_t last = -1;
  for (const SharedRange& shared : ranges_) {
    const int32_t ring = new_ring[static_cast<size_t>(shared.ring)];
    if (ring < 0) continue;
    if (shared.file != last) out.files.push_back(files_[static_cast<size_t>(shared.file)]);
    last = shared.file;
    out.ranges.push_back({static_cast<int32_t>(out.files.size()) - 1, ring, shared.range});
  }
  return out;
}

}  // namespace torch_ckpt
