#include "engine/exchange_stream.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "base/memory.h"

namespace torch_ckpt {
namespace {

// Threads that read, each with two buffers.
constexpr int kReadThreads = 2;

// What a piece of a file that is not checked may be read in: the blocks of direct I/O around it.
int64_t read_block_nbytes(int64_t piece_nbytes) { return piece_nbytes + 4 * kReadAlignment; }

// Pieces that must be in flight at once, so that one is received while another is sent.
constexpr int64_t kLeastInFlight = 2;

}  // namespace

ExchangeStream::ExchangeStream(RankExchange plan, std::shared_ptr<Peers> peers,
                               std::unique_ptr<BufferPool> pool, std::unique_ptr<ReadStream> reads,
                               std::chrono::milliseconds timeout)
    : plan_(std::move(plan)),
      pieces_(plan_.pieces()),
      peers_(std::move(peers)),
      pool_(std::move(pool)),
      reads_(std::move(reads)),
      timeout_(timeout),
      room_(pool_->block_count()) {}

ExchangeStream::~ExchangeStream() { close(); }

// Begins to watch all ranks that pieces come from or go to.
Status ExchangeStream::watch_all() {
  std::set<int32_t> ranks;
  for (const ExchangePiece& piece : pieces_) {
    if (piece.from >= 0) ranks.insert(piece.from);
    if (piece.to >= 0) ranks.insert(piece.to);
  }
  for (const int32_t rank : ranks) {
    Watched& watched = watched_.emplace_back();
    watched.rank = rank;
    ASSIGN_OR_RETURN(watched.end, peers_->receive({&watched.word, 1}, rank, Channel::kEnd));
    watched.thread = std::thread([this, &watched] { watch(watched.rank, *watched.end); });
  }
  return ok_status();
}

void ExchangeStream::watch(int32_t rank, PeerTransfer& end) {
  const Status status = end.wait();
  std::unique_lock<std::mutex> lock(mutex_);
  if (status.ok()) {
    ++ended_;
    changed_.notify_all();
  } else if (!closing_) {
    lock.unlock();
    fail(cancelled("rank ", rank, " has broken off: ", status.message()));
  }
}

Status ExchangeStream::finish() {
  const std::byte word{1};
  std::vector<std::unique_ptr<PeerTransfer>> sends;
  for (const Watched& watched : watched_) {
    ASSIGN_OR_RETURN(auto send, peers_->send({&word, 1}, watched.rank, Channel::kEnd));
    sends.push_back(std::move(send));
  }
  for (const auto& send : sends) RETURN_IF_ERROR(send->wait());
  // Who left now would break off what the others have still to say.
  std::unique_lock<std::mutex> lock(mutex_);
  const bool in_time =
      changed_.wait_for(lock, timeout_, [&] { return failed_ || ended_ == std::ssize(watched_); });
  if (in_time) return status_;
  return cancelled("after ", timeout_.count(), " ms, not all ranks have come to the end");
}

void ExchangeStream::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  for (Watched& watched : watched_) {
    if (watched.end != nullptr) watched.end->abort();
  }
  for (Watched& watched : watched_) {
    if (watched.thread.joinable()) watched.thread.join();
  }
  watched_.clear();
  peers_.reset();
}

Result<std::unique_ptr<ExchangeStream>> ExchangeStream::make(FileSystem& fs, RankExchange plan,
                                                             std::shared_ptr<Peers> peers,
                                                             int64_t budget_nbytes,
                                                             std::chrono::milliseconds timeout) {
  const int64_t block_nbytes = read_block_nbytes(plan.piece_nbytes);
  const int64_t reads_nbytes = kReadThreads * 2 * block_nbytes;
  if (budget_nbytes < reads_nbytes + kLeastInFlight * plan.piece_nbytes) {
    return invalid_argument("cannot exchange pieces of ", plan.piece_nbytes, " bytes in ",
                            budget_nbytes, " bytes of memory");
  }
  ASSIGN_OR_RETURN(auto reads, ReadStream::make(fs, reads_nbytes, block_nbytes, kReadThreads));
  const auto most_in_flight = std::max(kLeastInFlight, std::ssize(plan.pieces()));
  const int64_t pool_nbytes =
      std::min(budget_nbytes - reads_nbytes, most_in_flight * plan.piece_nbytes);
  HeapMemorySource heap;
  ASSIGN_OR_RETURN(auto pool, BufferPool::make(heap, pool_nbytes, plan.piece_nbytes));
  return std::unique_ptr<ExchangeStream>(new ExchangeStream(
      std::move(plan), std::move(peers), std::move(pool), std::move(reads), timeout));
}

void ExchangeStream::fail(const Status& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failed_) status_ = error;
  failed_ = true;
  for (PeerTransfer* transfer : transfers_) transfer->abort();
  changed_.notify_all();
}

Status ExchangeStream::run(std::span<const SharedPiece> pieces, Assembly& assembly) {
  const auto guarded = [this](auto&& work) {
    return [this, work] {
      try {
        work();
      } catch (const std::exception& error) {
        fail(internal_error("cannot go on exchanging: ", error.what()));
      }
    };
  };
  std::thread making_room;
  std::thread reading;
  guarded([&] {
    run_pieces_ = pieces;
    assembly_ = &assembly;
    in_flight_ = std::vector<InFlight>(pieces.size());
    with_room_ = 0;
    Status status = watched_.empty() ? watch_all() : ok_status();
    if (status.ok()) {
      making_room = std::thread(guarded([this] { make_room_for_all(); }));
      reading = std::thread(guarded([this] { read_all(); }));
      status = take_all();
    }
    if (!status.ok()) fail(status);
  })();
  for (std::thread* thread : {&making_room, &reading}) {
    if (thread->joinable()) thread->join();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  transfers_.clear();
  in_flight_.clear();  // What is in flight after an error ends here.
  return status_;
}

// Gives every piece room, in order, and begins to receive those that come from peers.
void ExchangeStream::make_room_for_all() {
  for (int64_t piece = 0; piece < std::ssize(run_pieces_); ++piece) {
    if (!make_room(piece)) return;
  }
}

// False after an error.
bool ExchangeStream::make_room(int64_t piece) {
  const auto i = static_cast<size_t>(piece);
  const SharedPiece& shared = run_pieces_[i];
  InFlight& own = in_flight_[i];
  std::unique_lock<std::mutex> lock(mutex_);
  while (!failed_ && room_ == 0) {
    if (sending_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const Status status = finish_oldest_send(lock);
    if (!status.ok()) {
      lock.unlock();
      fail(status);
      return false;
    }
  }
  if (failed_) return false;
  --room_;
  own.memory = assembly_->place(piece);
  if (own.memory == nullptr) {
    own.block = *pool_->acquire();  // There are as many blocks as there was room.
    own.memory = pool_->block(own.block).data();
  }
  if (shared.from < 0) {
    to_read_.push_back(piece);
  } else {
    lock.unlock();
    auto incoming = peers_->receive(memory_of(piece), shared.from, Channel::kPieces);
    if (!incoming.ok()) {
      fail(incoming.status());
      return false;
    }
    keep(std::move(*incoming), &own.incoming);
    lock.lock();
  }
  with_room_ = piece + 1;
  changed_.notify_all();
  return true;
}

// Holds on to a transfer, so that `fail` finds it.
void ExchangeStream::keep(std::unique_ptr<PeerTransfer> transfer,
                          std::unique_ptr<PeerTransfer>* place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_) transfer->abort();
  transfers_.insert(transfer.get());
  *place = std::move(transfer);
}

// Waits for the oldest piece that is on its way to the next rank, and lets it go.
Status ExchangeStream::finish_oldest_send(std::unique_lock<std::mutex>& lock) {
  const int64_t piece = sending_.front();
  sending_.pop_front();
  PeerTransfer& outgoing = *in_flight_[static_cast<size_t>(piece)].outgoing;
  lock.unlock();
  const Status status = outgoing.wait();
  lock.lock();
  RETURN_IF_ERROR(status);
  let_go(piece);
  return ok_status();
}

// Requires: the mutex is held, and nothing of the piece is in flight.
void ExchangeStream::let_go(int64_t piece) {
  InFlight& own = in_flight_[static_cast<size_t>(piece)];
  for (std::unique_ptr<PeerTransfer>* transfer : {&own.incoming, &own.outgoing}) {
    transfers_.erase(transfer->get());
    transfer->reset();
  }
  if (own.block >= 0) pool_->release(own.block);
  ++room_;
  changed_.notify_all();
}

// Reads what is this rank's to read, as it gets room.
void ExchangeStream::read_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] {
      return failed_ || !to_read_.empty() || with_room_ == std::ssize(run_pieces_);
    });
    if (failed_ || to_read_.empty()) return;
    const std::vector<int64_t> numbers(to_read_.begin(), to_read_.end());
    to_read_.clear();
    lock.unlock();
    std::vector<WantedRange> wanted;
    for (const int64_t number : numbers) {
      const SharedPiece& shared = run_pieces_[static_cast<size_t>(number)];
      wanted.push_back({shared.file, shared.range, memory_of(number).data(), nullptr, shared.sums,
                        assembly_->names(shared.file)});
    }
    const Status status = reads_->run(wanted, [&](int64_t index, Bytes bytes) {
      const int64_t number = numbers[static_cast<size_t>(index)];
      std::byte* memory = memory_of(number).data();
      if (bytes.data() != memory) std::memcpy(memory, bytes.data(), bytes.size());
      const std::lock_guard<std::mutex> holding(mutex_);
      in_flight_[static_cast<size_t>(number)].is_read = true;
      changed_.notify_all();
      return failed_ ? cancelled("another part of the load has failed") : ok_status();
    });
    if (!status.ok()) {
      fail(status);
      return;
    }
    lock.lock();
  }
}

// Takes every piece in order, as soon as it is there.
Status ExchangeStream::take_all() {
  for (int64_t piece = 0; piece < std::ssize(run_pieces_); ++piece) {
    RETURN_IF_ERROR(arrive(piece));
    const bool passed_on = run_pieces_[static_cast<size_t>(piece)].to >= 0;
    if (passed_on) RETURN_IF_ERROR(pass_on(piece));
    RETURN_IF_ERROR(assembly_->take(piece, memory_of(piece)));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (passed_on) {
      sending_.push_back(piece);
      changed_.notify_all();
    } else {
      let_go(piece);
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (!sending_.empty()) RETURN_IF_ERROR(finish_oldest_send(lock));
  return failed_ ? status_ : ok_status();
}

// Waits until a piece is read or received.
Status ExchangeStream::arrive(int64_t piece) {
  InFlight& own = in_flight_[static_cast<size_t>(piece)];
  const bool is_own = run_pieces_[static_cast<size_t>(piece)].from < 0;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return failed_ || (is_own ? own.is_read : with_room_ > piece); });
    if (failed_) return status_;
  }
  return is_own ? ok_status() : own.incoming->wait();
}

Status ExchangeStream::pass_on(int64_t piece) {
  auto outgoing =
      peers_->send(memory_of(piece), run_pieces_[static_cast<size_t>(piece)].to, Channel::kPieces);
  if (!outgoing.ok()) return outgoing.status();
  keep(std::move(*outgoing), &in_flight_[static_cast<size_t>(piece)].outgoing);
  return ok_status();
}

}  // namespace torch_ckpt
