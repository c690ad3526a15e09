#pragma once

// ExchangeStream: what several ranks want, read once and passed on.
//
// The counterpart of ReadStream for bytes that are shared: this rank's pieces come one after
// another, from its own disk or from a peer, are passed on, and are taken apart by the caller.
// Reading, checking, receiving, passing on and taking go on at the same time; memory is bounded.
//
// All ranks have their pieces in the same order, and make room for them in that order. So of all
// pieces that are not done, the first has room wherever it belongs, and goes on: nobody waits in a
// circle, however little memory there is. A piece that has room waits for no other: it is passed on
// as soon as it is there.
//
// A rank that fails breaks off, and so do the others, when their transfers with it fail. Every rank
// watches those that it exchanges with: each says when it has come to the end, so that a rank that
// is gone before is found out whatever it left half done.

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
  // `budget_nbytes` bounds the memory of pieces in flight and of reading them; `timeout`, how long
  // this rank waits at the end for others.
  // Errors: kInvalidArgument where that is less than about a dozen pieces.
  static Result<std::unique_ptr<ExchangeStream>> make(FileSystem& fs, RankExchange plan,
                                                      std::shared_ptr<Peers> peers,
                                                      int64_t budget_nbytes,
                                                      std::chrono::milliseconds timeout);
  ~ExchangeStream();

  // The files of this rank's pieces, ascending by name, and the pieces: in the order in which they
  // must be run.
  const std::vector<std::string>& files() const { return files_; }
  std::span<const ExchangePiece> pieces() const { return pieces_; }

  // Runs some pieces, those after the ones that were run before, and has `assembly` take each.
  // After an error no piece is in flight, and the stream must not be used again.
  Status run(std::span<const SharedPiece> pieces, Assembly& assembly);

  // Tells the others that this rank has come to the end, and waits until they have, too. All pieces
  // have been run. Errors: kCancelled where another has broken off, or is late.
  Status finish();

  // Lets go of the peers and of all memory. Requires: no `run` now or to come.
  void close();

  // Ends a `run`, now or to come, with this error. Safe to call from any thread.
  void fail(const Status& error);

 private:
  // A piece between the time when it has room and when it is done.
  struct InFlight {
    std::byte* memory = nullptr;
    int block = -1;           // Of the pool; none where the piece goes to its place at once.
    int64_t received_as = 0;  // Its number among those from the same rank, and to the same.
    int64_t sent_as = 0;
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
  Status receive_all(int32_t from);
  Status arrived(int64_t piece);
  Status open_pool();
  Status finish_oldest(std::unique_lock<std::mutex>& lock);
  Status wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& happened);
  void keep(std::unique_ptr<PeerTransfer> transfer, std::unique_ptr<PeerTransfer>* place);
  void let_go(int64_t piece);
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
  std::vector<std::unique_ptr<ReadStream>> readers_;  // Each of one thread.
  const std::chrono::milliseconds timeout_;

  // Of the present run.
  std::span<const SharedPiece> run_pieces_;
  Assembly* assembly_ = nullptr;
  std::map<int32_t, int64_t> received_count_;  // Of each rank, in all runs so far.
  std::map<int32_t, int64_t> sent_count_;

  // The ranks that pieces come from or go to, and the word of each that it has come to the end.
  struct Watched {
    int32_t rank = -1;
    std::byte word{};
    std::unique_ptr<PeerTransfer> end = nullptr;
    std::thread thread = {};
  };
  std::deque<Watched> watched_;

  std::mutex mutex_;  // Guards what follows, and the pool.
  std::condition_variable changed_;
  std::unique_ptr<BufferPool> pool_;  // Made by the first run, which knows what it is for.
  std::vector<InFlight> in_flight_;
  int64_t room_ = 0;       // For so many more pieces.
  int64_t with_room_ = 0;  // Pieces before this one have, or had, room.
  std::deque<int64_t> to_read_;
  std::deque<int64_t> leaving_;  // AcquiredSlot, and on their way to the next rank or to a device.
  int64_t done_ = 0;             // So many pieces are.
  std::set<PeerTransfer*> transfers_;
  bool failed_ = false;
  bool closing_ = false;
  std::set<int32_t> ended_;  // Of the watched, those that have come to the end.
  Status status_;
};

}  // namespace torch_ckpt
