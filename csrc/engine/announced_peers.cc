#include "engine/announced_peers.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "engine/link_meeting.h"

namespace torch_ckpt {
namespace {

// Says the number of a piece, among those from one rank to another.
using Word = int64_t;

Bytes bytes_of(const Word& word) { return std::as_bytes(std::span<const Word, 1>(&word, 1)); }

MutableBytes writable_bytes_of(Word& word) {
  return std::as_writable_bytes(std::span<Word, 1>(&word, 1));
}

// A piece from when its transfer is begun until it is done. Its peers' mutex guards it.
struct Piece {
  MutableBytes memory;
  Word number = 0;
  std::unique_ptr<PeerTransfer> room = nullptr;  // The word that says so, of one that comes.
  bool running = false;                          // Whether the link may use the memory.
  bool done = false;
};

using Pieces = std::map<Word, std::shared_ptr<Piece>>;

class AnnouncedPeers : public Peers {
 public:
  AnnouncedPeers(int32_t rank, std::shared_ptr<Peers> wire, std::shared_ptr<Peers> up,
                 std::shared_ptr<Peers> down, Memory memory)
      : rank_(rank),
        wire_(std::move(wire)),
        up_(std::move(up)),
        down_(std::move(down)),
        links_(rank, up_, down_, std::move(memory)) {}

  ~AnnouncedPeers() override {
    AnnouncedPeers::abort();
    for (auto& [rank, to] : outgoing_) {
      if (to.listening.joinable()) to.listening.join();
      if (to.sending.joinable()) to.sending.join();
    }
    for (auto& [rank, from] : incoming_) {
      if (from.receiving.joinable()) from.receiving.join();
    }
  }

  Status meet(std::span<const int32_t> ranks) override;
  void abort() override { fail(cancelled("aborted")); }
  std::string name_of(int32_t rank) const override { return wire_->name_of(rank); }

  Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                             int64_t number) override;
  Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank, Channel channel,
                                                int64_t number) override;

 private:
  struct Outgoing {
    Pieces ready;
    std::set<Word> with_room;
    std::thread listening;
    std::thread sending;
  };
  struct Incoming {
    Pieces with_room;
    int64_t rooms = 0;  // So many words have said so.
    std::thread receiving;
  };

  class PieceTransfer : public PeerTransfer {
   public:
    PieceTransfer(AnnouncedPeers& peers, Pieces& waiting, std::shared_ptr<Piece> piece)
        : peers_(peers), waiting_(waiting), piece_(std::move(piece)) {}
    ~PieceTransfer() override {
      std::unique_lock<std::mutex> lock(peers_.mutex_);
      if (!piece_->running) waiting_.erase(piece_->number);
      peers_.changed_.wait(lock, [&] { return !piece_->running; });
    }

    Status wait() override {
      std::unique_lock<std::mutex> lock(peers_.mutex_);
      peers_.changed_.wait(lock, [&] { return piece_->done || peers_.failed_; });
      return piece_->done ? ok_status() : peers_.status_;
    }

    void abort() override { peers_.abort(); }

   private:
    AnnouncedPeers& peers_;
    Pieces& waiting_;
    const std::shared_ptr<Piece> piece_;
  };

  Peers& link_to(int32_t rank) { return rank > rank_ ? *up_ : *down_; }
  Peers& link_from(int32_t rank) { return rank > rank_ ? *down_ : *up_; }

  template <typename Work>
  std::thread start(const Work& work);
  template <typename Happened>
  Status wait_until(std::unique_lock<std::mutex>& lock, const Happened& happened);
  void fail(const Status& error);
  Status finish(Result<std::unique_ptr<PeerTransfer>> begun);
  void end(Piece& piece);

  Status listen_for_room(int32_t rank, Outgoing& to);
  Status send_all(int32_t rank, Outgoing& to);
  Status send_next(int32_t rank, Piece& piece, int64_t announced);
  Status receive_all(int32_t rank, Incoming& from);
  Status receive_next(int32_t rank, Incoming& from, int64_t announced);

  const int32_t rank_;
  const std::shared_ptr<Peers> wire_;
  const std::shared_ptr<Peers> up_;
  const std::shared_ptr<Peers> down_;
  LinkMeeting links_;

  std::mutex mutex_;  // Guards what follows.
  std::condition_variable changed_;
  std::map<int32_t, Outgoing> outgoing_;
  std::map<int32_t, Incoming> incoming_;
  std::set<PeerTransfer*> going_;  // What a thread waits for.
  bool failed_ = false;
  Status status_;
};

// A thread of this, which none of its errors leaves.
template <typename Work>
std::thread AnnouncedPeers::start(const Work& work) {
  return std::thread([this, work] {
    try {
      const Status status = work();
      if (!status.ok()) fail(status);
    } catch (const std::exception& error) {
      fail(internal_error("cannot go on exchanging: ", error.what()));
    }
  });
}

template <typename Happened>
Status AnnouncedPeers::wait_until(std::unique_lock<std::mutex>& lock, const Happened& happened) {
  changed_.wait(lock, [&] { return failed_ || happened(); });
  return failed_ ? status_ : ok_status();
}

void AnnouncedPeers::fail(const Status& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_) return;
  failed_ = true;
  status_ = error;
  for (PeerTransfer* transfer : going_) transfer->abort();
  wire_->abort();
  links_.abort();
  changed_.notify_all();
}

// Waits for a transfer of the wire or of a link, which `fail` ends.
Status AnnouncedPeers::finish(Result<std::unique_ptr<PeerTransfer>> begun) {
  ASSIGN_OR_RETURN(const std::unique_ptr<PeerTransfer> transfer, std::move(begun));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) transfer->abort();
    going_.insert(transfer.get());
  }
  Status status = transfer->wait();
  const std::lock_guard<std::mutex> lock(mutex_);
  going_.erase(transfer.get());
  return status;
}

void AnnouncedPeers::end(Piece& piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  piece.running = false;
  changed_.notify_all();
}

// Nothing ends a wait for a rank that never made its links: so all say first that they have.
Status AnnouncedPeers::meet(std::span<const int32_t> ranks) {
  RETURN_IF_ERROR(wire_->meet(ranks));
  const std::byte said{1};
  std::vector<std::byte> heard(ranks.size());
  std::vector<std::unique_ptr<PeerTransfer>> words;
  for (size_t i = 0; i < ranks.size(); ++i) {
    ASSIGN_OR_RETURN(auto sent, wire_->send({&said, 1}, ranks[i], Channel::kMeeting, 0));
    words.push_back(std::move(sent));
    ASSIGN_OR_RETURN(auto come, wire_->receive({&heard[i], 1}, ranks[i], Channel::kMeeting, 0));
    words.push_back(std::move(come));
  }
  for (auto& word : words) RETURN_IF_ERROR(finish(std::move(word)));
  const Status met = links_.meet({ranks.begin(), ranks.end()});
  const std::lock_guard<std::mutex> lock(mutex_);
  return failed_ ? status_ : met;
}

Result<std::unique_ptr<PeerTransfer>> AnnouncedPeers::send(Bytes bytes, int32_t rank,
                                                           Channel channel, int64_t number) {
  if (channel != Channel::kPieces) return wire_->send(bytes, rank, channel, number);
  auto piece = std::make_shared<Piece>();
  piece->memory = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  piece->number = number;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_) return status_;
  Outgoing& to = outgoing_[rank];
  to.ready.emplace(number, piece);
  changed_.notify_all();
  auto transfer = std::make_unique<PieceTransfer>(*this, to.ready, std::move(piece));
  if (!to.listening.joinable()) {
    to.listening = start([this, rank, &to] { return listen_for_room(rank, to); });
    to.sending = start([this, rank, &to] { return send_all(rank, to); });
  }
  return std::unique_ptr<PeerTransfer>(std::move(transfer));
}

Result<std::unique_ptr<PeerTransfer>> AnnouncedPeers::receive(MutableBytes memory, int32_t rank,
                                                              Channel channel, int64_t number) {
  if (channel != Channel::kPieces) return wire_->receive(memory, rank, channel, number);
  auto piece = std::make_shared<Piece>();
  piece->memory = memory;
  piece->number = number;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_) return status_;
  Incoming& from = incoming_[rank];
  ASSIGN_OR_RETURN(piece->room,
                   wire_->send(bytes_of(piece->number), rank, Channel::kRoom, from.rooms++));
  from.with_room.emplace(number, piece);
  changed_.notify_all();
  auto transfer = std::make_unique<PieceTransfer>(*this, from.with_room, std::move(piece));
  if (!from.receiving.joinable()) {
    from.receiving = start([this, rank, &from] { return receive_all(rank, from); });
  }
  return std::unique_ptr<PeerTransfer>(std::move(transfer));
}

// Learns which pieces the other end has room for, while one that lies ready is not among them: a
// word that nobody needs yet may take as long as it likes.
Status AnnouncedPeers::listen_for_room(int32_t rank, Outgoing& to) {
  for (int64_t heard = 0;; ++heard) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      RETURN_IF_ERROR(wait_until(lock, [&] {
        return std::ranges::any_of(
            to.ready, [&](const auto& piece) { return !to.with_room.contains(piece.first); });
      }));
    }
    Word word = 0;
    RETURN_IF_ERROR(finish(wire_->receive(writable_bytes_of(word), rank, Channel::kRoom, heard)));
    const std::lock_guard<std::mutex> lock(mutex_);
    to.with_room.insert(word);
    changed_.notify_all();
  }
}

// Sends what lies ready and has room, one after another.
Status AnnouncedPeers::send_all(int32_t rank, Outgoing& to) {
  for (int64_t announced = 0;; ++announced) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto next = [&] {
      return std::ranges::find_if(
          to.ready, [&](const auto& piece) { return to.with_room.contains(piece.first); });
    };
    RETURN_IF_ERROR(wait_until(lock, [&] { return next() != to.ready.end(); }));
    const std::shared_ptr<Piece> piece = next()->second;
    to.ready.erase(piece->number);
    to.with_room.erase(piece->number);
    piece->running = true;
    lock.unlock();
    const Status status = send_next(rank, *piece, announced);
    end(*piece);
    RETURN_IF_ERROR(status);
  }
}

Status AnnouncedPeers::send_next(int32_t rank, Piece& piece, int64_t announced) {
  ASSIGN_OR_RETURN(auto word, wire_->send(bytes_of(piece.number), rank, Channel::kNext, announced));
  RETURN_IF_ERROR(finish(link_to(rank).send(piece.memory, rank, Channel::kPieces, piece.number)));
  RETURN_IF_ERROR(finish(std::move(word)));
  const std::lock_guard<std::mutex> lock(mutex_);
  piece.done = true;
  return ok_status();
}

// Receives what the other end says, while there is room for anything.
Status AnnouncedPeers::receive_all(int32_t rank, Incoming& from) {
  for (int64_t announced = 0;; ++announced) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      RETURN_IF_ERROR(wait_until(lock, [&] { return !from.with_room.empty(); }));
    }
    RETURN_IF_ERROR(receive_next(rank, from, announced));
  }
}

Status AnnouncedPeers::receive_next(int32_t rank, Incoming& from, int64_t announced) {
  Word word = 0;
  RETURN_IF_ERROR(finish(wire_->receive(writable_bytes_of(word), rank, Channel::kNext, announced)));
  std::shared_ptr<Piece> piece;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return status_;
    const auto found = from.with_room.find(word);
    if (found == from.with_room.end()) {
      return internal_error(name_of(rank), " sends piece ", word, ", which has no room");
    }
    piece = found->second;
    from.with_room.erase(found);
    piece->running = true;
  }
  Status status = finish(link_from(rank).receive(piece->memory, rank, Channel::kPieces, word));
  if (status.ok()) status = finish(std::move(piece->room));
  if (status.ok()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    piece->done = true;
  }
  end(*piece);
  return status;
}

}  // namespace

std::shared_ptr<Peers> make_announced_peers(int32_t rank, std::shared_ptr<Peers> wire,
                                            std::shared_ptr<Peers> up, std::shared_ptr<Peers> down,
                                            Memory memory) {
  return std::make_shared<AnnouncedPeers>(rank, std::move(wire), std::move(up), std::move(down),
                                          std::move(memory));
}

}  // namespace torch_ckpt
