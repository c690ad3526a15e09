#include "engine/exchange/exchange_stream.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

namespace torch_ckpt {
namespace {

// Number of reader threads, and so of pieces that are read and verified at once.
constexpr int64_t kReaders = 4;

// Buffer length for an unverified piece: the blocks of direct I/O around it.
int64_t read_block_nbytes(int64_t piece_nbytes) { return piece_nbytes + 4 * kReadAlignment; }

// Minimum number of pieces in flight, so that one is received while another is sent.
constexpr int64_t kMinInFlight = 2;

// Pieces in flight for each rank of the widest ring, which keep all its readers busy. More of them
// would only take more memory, whose pages must be allocated first.
constexpr int64_t kInFlightPerRank = 2;

}  // namespace

ExchangeStream::ExchangeStream(std::vector<std::string> files, std::vector<ExchangePiece> pieces,
                               std::shared_ptr<Peers> peers, int64_t pool_nbytes,
                               int64_t block_nbytes,
                               std::vector<std::unique_ptr<ReadStream>> readers,
                               std::chrono::milliseconds timeout)
    : files_(std::move(files)),
      pieces_(std::move(pieces)),
      peers_(std::move(peers)),
      pool_nbytes_(pool_nbytes),
      block_nbytes_(block_nbytes),
      readers_(std::move(readers)),
      timeout_(timeout) {}

ExchangeStream::~ExchangeStream() { close(); }

// Starts to watch all ranks that send pieces to this rank or receive pieces from it.
Status ExchangeStream::watch_all() {
  std::set<int32_t> ranks;
  for (const ExchangePiece& piece : pieces_) {
    if (piece.from >= 0) ranks.insert(piece.from);
    if (piece.to >= 0) ranks.insert(piece.to);
  }
  // Before the preparation of transfers, so that a rank that fails by then is noticed.
  for (const int32_t rank : ranks) {
    Watched& watched = watched_.emplace_back();
    watched.rank = rank;
    ASSIGN_OR_RETURN(watched.end, peers_->receive({&watched.message, 1}, rank, Channel::kEnd, 0));
    watched.thread = std::thread([this, &watched] { watch(watched.rank, *watched.end); });
  }
  return peers_->connect(std::vector<int32_t>(ranks.begin(), ranks.end()));
}

void ExchangeStream::watch(int32_t rank, PeerTransfer& end) {
  const Status status = end.wait();
  std::unique_lock<std::mutex> lock(mutex_);
  if (status.ok()) {
    ended_.insert(rank);
    changed_.notify_all();
  } else if (!closing_) {
    lock.unlock();
    fail(cancelled("exchange with ", peers_->name_of(rank), " failed: ", status.message()));
  }
}

Status ExchangeStream::finish() {
  const Busy waits(*this, -1);
  const std::byte message{1};
  std::vector<std::unique_ptr<PeerTransfer>> sends;
  for (const Watched& watched : watched_) {
    ASSIGN_OR_RETURN(auto send, peers_->send({&message, 1}, watched.rank, Channel::kEnd, 0));
    sends.push_back(std::move(send));
  }
  for (const auto& send : sends) RETURN_IF_ERROR(send->wait());
  // Closing now would cut off the messages that peers still send.
  std::unique_lock<std::mutex> lock(mutex_);
  const bool in_time = changed_.wait_for(
      lock, timeout_, [&] { return failed_ || ended_.size() == watched_.size(); });
  if (in_time) return status_;
  std::string late;
  for (const Watched& watched : watched_) {
    if (ended_.contains(watched.rank)) continue;
    late += (late.empty() ? "" : ", ") + peers_->name_of(watched.rank);
  }
  return cancelled("cannot finish the exchange within ", timeout_.count(), " ms: waiting for ",
                   late);
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
  // Python code that stores an error may extend the life of this object. Free the memory now.
  pool_.reset();
  readers_.clear();
}

Result<std::unique_ptr<ExchangeStream>> ExchangeStream::make(FileSystem& fs, RankExchange plan,
                                                             std::shared_ptr<Peers> peers,
                                                             int64_t budget_nbytes,
                                                             std::chrono::milliseconds timeout) {
  const int64_t block_nbytes = read_block_nbytes(plan.piece_nbytes);
  const int64_t reader_nbytes = 2 * block_nbytes;
  const int64_t room_nbytes = budget_nbytes - kReaders * reader_nbytes;
  if (room_nbytes < kMinInFlight * plan.piece_nbytes) {
    return invalid_argument("cannot exchange pieces of ", plan.piece_nbytes, " bytes in ",
                            budget_nbytes, " bytes of memory");
  }
  std::vector<std::unique_ptr<ReadStream>> readers;
  for (int64_t i = 0; i < kReaders; ++i) {
    ASSIGN_OR_RETURN(auto reader, ReadStream::make(fs, reader_nbytes, block_nbytes, 1));
    readers.push_back(std::move(reader));
  }
  std::vector<ExchangePiece> pieces = plan.pieces();
  int64_t widest = kReaders;
  for (const ReadRing& ring : plan.rings) widest = std::max(widest, std::ssize(ring.ranks));
  const int64_t most_in_flight =
      std::clamp<int64_t>(std::ssize(pieces), kMinInFlight, kInFlightPerRank * widest);
  const int64_t pool_nbytes = std::min(room_nbytes, most_in_flight * plan.piece_nbytes);
  RETURN_IF_ERROR(BufferPool::check(pool_nbytes, plan.piece_nbytes));
  return std::unique_ptr<ExchangeStream>(
      new ExchangeStream(std::move(plan.files), std::move(pieces), std::move(peers), pool_nbytes,
                         plan.piece_nbytes, std::move(readers), timeout));
}

// Allocates the memory for pieces, of the kind that the destination device copies from fastest.
Status ExchangeStream::open_pool() {
  ASSIGN_OR_RETURN(auto pool, make_pool_for(assembly_->for_device(), pool_nbytes_, block_nbytes_));
  RETURN_IF_ERROR(pool->populate());
  const std::lock_guard<std::mutex> lock(mutex_);
  pool_ = std::move(pool);
  room_ = pool_->block_count();
  return ok_status();
}

void ExchangeStream::fail(const Status& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failed_) status_ = error;
  failed_ = true;
  for (PeerTransfer* transfer : transfers_) transfer->abort();
  if (!closing_) peers_->abort();
  changed_.notify_all();
}

Status ExchangeStream::run(std::span<const SharedPiece> pieces, Assembly& assembly) {
  // Catches every exception, because one that leaves a thread would end the process.
  const auto guarded = [this](auto&& work) {
    return [this, work] {
      try {
        const Status status = work();
        if (!status.ok()) fail(status);
      } catch (const std::exception& error) {
        fail(internal_error("cannot continue the exchange: ", error.what()));
      }
    };
  };
  std::vector<std::thread> threads;
  std::unique_ptr<Busy> waits;  // This thread waits for the others, once there is memory.
  guarded([&]() -> Status {
    run_pieces_ = pieces;
    assembly_ = &assembly;
    number_all();
    if (pool_ == nullptr) RETURN_IF_ERROR(open_pool());
    waits.reset(new Busy(*this, -1));
    if (watched_.empty()) RETURN_IF_ERROR(watch_all());
    std::set<int32_t> sources;
    for (const SharedPiece& piece : pieces) sources.insert(piece.from);
    for (const int32_t from : sources) {
      if (from >= 0) threads.emplace_back(guarded([this, from] { return receive_all(from); }));
    }
    for (const auto& reader : readers_) {
      if (!sources.contains(-1)) break;
      threads.emplace_back(guarded([this, &reader] { return read_all(*reader); }));
    }
    for (int64_t piece = 0; piece < std::ssize(pieces); ++piece) RETURN_IF_ERROR(make_room(piece));
    std::unique_lock<std::mutex> lock(mutex_);
    return wait_until(lock, [&] { return done_ == std::ssize(pieces); });
  })();
  for (std::thread& thread : threads) thread.join();
  waits.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  transfers_.clear();
  in_flight_.clear();  // Ends the transfers that are in flight after an error.
  return status_;
}

// Numbers the pieces between this rank and each peer. The peer has the same pieces in the same
// order, so both assign the same numbers.
void ExchangeStream::number_all() {
  in_flight_ = std::vector<InFlight>(run_pieces_.size());
  with_room_ = 0;
  done_ = 0;
  for (int64_t piece = 0; piece < std::ssize(run_pieces_); ++piece) {
    const auto [from, to] = std::pair(shared(piece).from, shared(piece).to);
    if (from >= 0) in_flight(piece).received_as = received_count_[from]++;
    if (to >= 0) in_flight(piece).sent_as = sent_count_[to]++;
  }
}

// Waits for room for a piece, then queues its read or starts to receive it. Called in piece order.
Status ExchangeStream::make_room(int64_t piece) {
  InFlight& own = in_flight(piece);
  const int32_t from = shared(piece).from;
  std::unique_lock<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(wait_until(lock, [&] { return room_ > 0; }));
  --room_;
  own.memory = assembly_->place(piece);
  if (own.memory == nullptr) {
    own.block = *pool_->acquire();  // Succeeds: `room_` counts no more pieces than free blocks.
    own.memory = pool_->block(own.block).data();
  }
  if (from < 0) {
    to_read_.push_back(piece);
  } else {
    lock.unlock();
    ASSIGN_OR_RETURN(auto incoming,
                     peers_->receive(memory_of(piece), from, Channel::kPieces, own.received_as));
    track(std::move(incoming), &own.incoming);
    lock.lock();
  }
  with_room_ = piece + 1;
  changed_.notify_all();
  return ok_status();
}

// Stores a transfer, so that `fail` can abort it.
void ExchangeStream::track(std::unique_ptr<PeerTransfer> transfer,
                           std::unique_ptr<PeerTransfer>* place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_) transfer->abort();
  transfers_.insert(transfer.get());
  *place = std::move(transfer);
}

// Waits for the oldest leaving piece, and releases it.
Status ExchangeStream::finish_oldest(std::unique_lock<std::mutex>& lock) {
  const int64_t piece = leaving_.front();
  leaving_.pop_front();
  InFlight& own = in_flight(piece);
  lock.unlock();
  const Status sent = own.outgoing == nullptr ? ok_status() : own.outgoing->wait();
  const Status unpacked = own.unpacking.wait();
  lock.lock();
  RETURN_IF_ERROR(sent);
  RETURN_IF_ERROR(unpacked);
  release(piece);
  return ok_status();
}

// Waits for `happened`, and releases leaving pieces meanwhile. Errors: that of the run.
Status ExchangeStream::wait_until(std::unique_lock<std::mutex>& lock,
                                  const std::function<bool()>& happened) {
  while (!failed_ && !happened()) {
    if (leaving_.empty()) {
      changed_.wait(lock);
    } else {
      RETURN_IF_ERROR(finish_oldest(lock));
    }
  }
  return failed_ ? status_ : ok_status();
}

// Frees the memory of a piece. Requires: the caller owns the mutex; no transfer or copy of the
// piece is in flight.
void ExchangeStream::release(int64_t piece) {
  InFlight& own = in_flight(piece);
  for (std::unique_ptr<PeerTransfer>* transfer : {&own.incoming, &own.outgoing}) {
    transfers_.erase(transfer->get());
    transfer->reset();
  }
  if (own.block >= 0) pool_->release(own.block);
  ++room_;
  ++done_;
  changed_.notify_all();
}

int64_t ExchangeStream::requests() const {
  int64_t requests = 0;
  for (const auto& reader : readers_) requests += reader->requests();
  return requests;
}

double ExchangeStream::waited_s() const {
  double waited_s = 0;
  for (const auto& reader : readers_) waited_s += reader->waited_s();
  return readers_.empty() ? 0 : waited_s / static_cast<double>(readers_.size());
}

double ExchangeStream::waited_for_ranks_s() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::chrono::duration<double>(idle_).count();
}

void ExchangeStream::count_busy(int change) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (busy_ == 0) idle_ += now - idle_since_;
  busy_ += change;
  idle_since_ = now;
}

// Reads this rank's pieces as they get room. Several readers share the queue.
Status ExchangeStream::read_all(ReadStream& reader) {
  while (true) {
    const std::vector<int64_t> numbers = next_to_read();
    if (numbers.empty()) return ok_status();
    RETURN_IF_ERROR(read(reader, numbers));
  }
}

// Returns the next pieces to read together, at most one block in total. Returns none if all pieces
// are read or the run failed.
std::vector<int64_t> ExchangeStream::next_to_read() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(
      lock, [&] { return failed_ || !to_read_.empty() || with_room_ == std::ssize(run_pieces_); });
  std::vector<int64_t> numbers;
  int64_t nbytes = 0;
  while (!failed_ && !to_read_.empty()) {
    nbytes += shared(to_read_.front()).range.nbytes();
    if (!numbers.empty() && nbytes > block_nbytes_) break;
    numbers.push_back(to_read_.front());
    to_read_.pop_front();
  }
  return numbers;
}

Status ExchangeStream::read(ReadStream& reader, const std::vector<int64_t>& numbers) {
  const Busy busy(*this);
  std::vector<WantedRange> wanted;
  for (const int64_t number : numbers) {
    const SharedPiece& piece = shared(number);
    wanted.push_back({piece.file, piece.range, memory_of(number).data(), nullptr, piece.sums,
                      assembly_->names(piece.file)});
  }
  return reader.run(wanted, [&](int64_t index, Bytes bytes, Unpacking&) {
    const int64_t number = numbers[static_cast<size_t>(index)];
    std::byte* memory = memory_of(number).data();
    if (bytes.data() != memory) std::memcpy(memory, bytes.data(), bytes.size());
    return arrived(number);
  });
}

// Receives all pieces from one rank.
Status ExchangeStream::receive_all(int32_t from) {
  for (int64_t piece = 0; piece < std::ssize(run_pieces_); ++piece) {
    if (shared(piece).from != from) continue;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return failed_ || with_room_ > piece; });
      if (failed_) return status_;
    }
    RETURN_IF_ERROR(in_flight(piece).incoming->wait());
    const Busy busy(*this);
    RETURN_IF_ERROR(arrived(piece));
  }
  return ok_status();
}

// Forwards a piece that is complete in its memory, and passes it to the assembly.
Status ExchangeStream::arrived(int64_t piece) {
  const int32_t to = shared(piece).to;
  InFlight& own = in_flight(piece);
  if (to >= 0) {
    ASSIGN_OR_RETURN(auto outgoing,
                     peers_->send(memory_of(piece), to, Channel::kPieces, own.sent_as));
    track(std::move(outgoing), &own.outgoing);
  }
  own.unpacking = Unpacking(memory_of(piece));
  RETURN_IF_ERROR(assembly_->add(piece, memory_of(piece), own.unpacking));
  RETURN_IF_ERROR(own.unpacking.start());
  ASSIGN_OR_RETURN(const bool unpacked, own.unpacking.done());
  const std::lock_guard<std::mutex> lock(mutex_);
  if (to < 0 && unpacked) {
    release(piece);
  } else {
    leaving_.push_back(piece);
    changed_.notify_all();
  }
  return failed_ ? status_ : ok_status();
}

}  // namespace torch_ckpt
