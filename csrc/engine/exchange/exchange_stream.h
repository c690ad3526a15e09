#pragma once

// ExchangeStream: reads each byte that several ranks request once, and forwards it among them.
//
// This is the counterpart of ReadStream for shared bytes. This rank reads a piece from disk or
// receives it from a peer, forwards it to the next peer, and passes it to the Assembly. Reading,
// verification, receiving, forwarding and consumption run concurrently in bounded memory.
//
// All ranks order their pieces alike and allocate room in that order. So the first unfinished piece
// has room on every rank that needs it and can always proceed. No set of ranks can deadlock,
// however little memory they have. A piece with room waits for no other piece: it is forwarded as
// soon as it arrives.
//
// A piece need not have a consumer. A holder reads and sends pieces of files of which it wants
// nothing, in the same memory.
//
// A rank that fails closes its connections, and then the transfers of its peers fail. Every rank
// watches its peers: each peer sends a message when it reaches the end of the exchange. So a rank
// notices a peer that is gone, whatever transfers that peer left incomplete.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "engine/exchange/assembly.h"
#include "engine/exchange/peers.h"
#include "engine/read_stream.h"
#include "io/buffer_pool.h"
#include "io/file_system.h"
#include "plan/exchange.h"

namespace torch_ckpt {

class ExchangeStream {
 public:
  // `budget_nbytes` bounds the memory for pieces in flight and for reading. `timeout` bounds the
  // wait for peers in `finish`.
  // Errors: kInvalidArgument if the budget is less than about a dozen pieces.
  static Result<std::unique_ptr<ExchangeStream>> make(FileSystem& fs, RankExchange plan,
                                                      std::shared_ptr<Peers> peers,
                                                      int64_t budget_nbytes,
                                                      std::chrono::milliseconds timeout);
  ~ExchangeStream();

  // The files of this rank's pieces, ascending by name.
  const std::vector<std::string>& files() const { return files_; }

  // The pieces, in the order in which `run` must process them.
  std::span<const ExchangePiece> pieces() const { return pieces_; }

  // Runs the next pieces, and passes each to `assembly`. After an error no piece is in flight. Do
  // not use the stream again after an error.
  Status run(std::span<const SharedPiece> pieces, Assembly& assembly);

  // Notifies the peers that this rank reached the end, and waits until they have. Requires: all
  // pieces have run. Errors: kCancelled if a peer fails or exceeds the timeout.
  Status finish();

  // Releases the peers and all memory. Requires: no `run`, now or later.
  void close();

  // Requests of all runs, and the seconds for which a reader, on average, did nothing but wait for
  // them. Any thread may call them.
  int64_t requests() const;
  double waited_s() const;
  // Seconds of all runs and of `finish` in which no thread was Busy: pieces of other ranks had not
  // arrived, or were still being sent on. Any thread may call it.
  double waited_for_ranks_s() const;

  // Counts a thread as busy within a scope, for `waited_for_ranks_s`: it reads or consumes bytes.
  class Busy {
   public:
    explicit Busy(ExchangeStream& stream) : Busy(stream, 1) {}
    ~Busy() { stream_.count_busy(-change_); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    friend class ExchangeStream;
    Busy(ExchangeStream& stream, int change) : stream_(stream), change_(change) {
      stream_.count_busy(change_);
    }
    ExchangeStream& stream_;
    const int change_;  // -1 for a caller that only waits.
  };

  // Ends the current or a later `run` with this error. Safe to call from any thread.
  void fail(const Status& error);

 private:
  // A piece from the allocation of its room until it is done.
  struct InFlight {
    std::byte* memory = nullptr;
    int block = -1;           // Block of the pool; -1 if the piece goes directly to its place.
    int64_t received_as = 0;  // Number among the pieces from the same rank.
    int64_t sent_as = 0;      // Number among the pieces to the same rank.
    std::unique_ptr<PeerTransfer> incoming = nullptr;
    std::unique_ptr<PeerTransfer> outgoing = nullptr;
    Unpacking unpacking = {};
  };

  ExchangeStream(std::vector<std::string> files, std::vector<ExchangePiece> pieces,
                 std::shared_ptr<Peers> peers, int64_t pool_nbytes, int64_t block_nbytes,
                 std::vector<std::unique_ptr<ReadStream>> readers,
                 std::chrono::milliseconds timeout);

  Status watch_all();
  void watch(int32_t rank, PeerTransfer& end);
  void number_all();
  Status make_room(int64_t piece);
  Status read_all(ReadStream& reader);
  std::vector<int64_t> next_to_read();
  Status read(ReadStream& reader, const std::vector<int64_t>& numbers);
  // Counts a thread that reads or consumes bytes, or with -1 one that no longer does.
  void count_busy(int change);
  Status receive_all(int32_t from);
  Status arrived(int64_t piece);
  Status open_pool();
  Status finish_oldest(std::unique_lock<std::mutex>& lock);
  Status wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& happened);
  void track(std::unique_ptr<PeerTransfer> transfer, std::unique_ptr<PeerTransfer>* place);
  void release(int64_t piece);
  InFlight& in_flight(int64_t piece) { return in_flight_[static_cast<size_t>(piece)]; }
  const SharedPiece& shared(int64_t piece) const { return run_pieces_[static_cast<size_t>(piece)]; }
  MutableBytes memory_of(int64_t piece) {
    return {in_flight(piece).memory, static_cast<size_t>(shared(piece).range.nbytes())};
  }

  const std::vector<std::string> files_;
  const std::vector<ExchangePiece> pieces_;
  std::shared_ptr<Peers> peers_;
  const int64_t pool_nbytes_;
  const int64_t block_nbytes_;
  std::vector<std::unique_ptr<ReadStream>> readers_;  // One thread each.
  const std::chrono::milliseconds timeout_;

  // Pieces and assembly of the current run.
  std::span<const SharedPiece> run_pieces_;
  Assembly* assembly_ = nullptr;
  std::map<int32_t, int64_t> received_count_;  // Pieces per source rank, in all runs so far.
  std::map<int32_t, int64_t> sent_count_;      // Pieces per target rank, in all runs so far.

  // A peer that sends or receives pieces, and its end-of-exchange message.
  struct Watched {
    int32_t rank = -1;
    std::byte message{};
    std::unique_ptr<PeerTransfer> end = nullptr;
    std::thread thread = {};
  };
  std::deque<Watched> watched_;

  mutable std::mutex mutex_;  // Guards the members below, and the pool.
  std::condition_variable changed_;
  std::unique_ptr<BufferPool> pool_;  // Allocated by the first run, for the device it loads to.
  std::vector<InFlight> in_flight_;
  int64_t room_ = 0;       // Number of pieces for which room is left.
  int64_t with_room_ = 0;  // Pieces before this index have room, or had it.
  std::deque<int64_t> to_read_;
  std::deque<int64_t> leaving_;  // Arrived pieces with a send or a device copy in progress.
  int64_t done_ = 0;             // Number of pieces that are done.
  std::set<PeerTransfer*> transfers_;
  bool failed_ = false;
  bool closing_ = false;
  int busy_ = 1;  // Threads that read or consume bytes; the caller counts as one between its calls.
  std::chrono::steady_clock::time_point idle_since_;
  std::chrono::nanoseconds idle_{0};  // Time in which `busy_` was 0.
  std::set<int32_t> ended_;           // Watched ranks that reached the end.
  Status status_;
};

}  // namespace torch_ckpt
