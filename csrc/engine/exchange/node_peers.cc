#include "engine/exchange/node_peers.h"

#include <sys/types.h>
#include <sys/uio.h>

#include <cerrno>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

namespace torch_ckpt {
namespace {

// A range of memory of a process.
struct Place {
  uint64_t address = 0;
  uint64_t nbytes = 0;
};

Place place_of(Bytes bytes) { return {reinterpret_cast<uintptr_t>(bytes.data()), bytes.size()}; }

template <typename T>
Bytes bytes_of(const T& value) {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

template <typename T>
MutableBytes writable_bytes_of(T& value) {
  return std::as_writable_bytes(std::span<T, 1>(&value, 1));
}

// Copies `place` in the memory of another process to `memory`.
Status copy_from(int64_t pid, const Place& place, MutableBytes memory) {
  if (memory.size() != place.nbytes) {
    return internal_error("another rank sends ", place.nbytes, " bytes instead of ", memory.size());
  }
  for (size_t done = 0; done < memory.size();) {
    const iovec to = {memory.data() + done, memory.size() - done};
    // An address of the other process. NOLINTNEXTLINE(performance-no-int-to-ptr)
    const iovec from = {reinterpret_cast<void*>(place.address + done), memory.size() - done};
    const ssize_t copied = process_vm_readv(static_cast<pid_t>(pid), &to, 1, &from, 1, 0);
    if (copied <= 0) {
      return cancelled("cannot copy from the memory of process ", pid, ": ",
                       std::generic_category().message(copied < 0 ? errno : EFAULT));
    }
    done += static_cast<size_t>(copied);
  }
  return ok_status();
}

// The sending side: sends the address of the bytes, and is done when the peer acknowledges its
// copy.
class OfferedTransfer : public PeerTransfer {
 public:
  static Result<std::unique_ptr<PeerTransfer>> begin(Peers& wire, Bytes bytes, int32_t rank,
                                                     int64_t number) {
    auto out = std::make_unique<OfferedTransfer>();
    out->place_ = place_of(bytes);
    ASSIGN_OR_RETURN(out->copied_,
                     wire.receive(writable_bytes_of(out->ack_), rank, Channel::kCopied, number));
    ASSIGN_OR_RETURN(out->offer_, wire.send(bytes_of(out->place_), rank, Channel::kPieces, number));
    return std::unique_ptr<PeerTransfer>(std::move(out));
  }

  Status wait() override {
    RETURN_IF_ERROR(offer_->wait());
    return copied_->wait();
  }

  void abort() override {
    offer_->abort();
    copied_->abort();
  }

 private:
  Place place_;
  uint8_t ack_ = 0;
  std::unique_ptr<PeerTransfer> offer_;
  std::unique_ptr<PeerTransfer> copied_;
};

// The receiving side: copies the bytes at the received address, and acknowledges the copy.
class CopyingTransfer : public PeerTransfer {
 public:
  CopyingTransfer(Peers& wire, MutableBytes memory, int32_t rank, int64_t pid, int64_t number)
      : wire_(wire), memory_(memory), rank_(rank), pid_(pid), number_(number) {}

  static Result<std::unique_ptr<PeerTransfer>> begin(Peers& wire, MutableBytes memory, int32_t rank,
                                                     int64_t pid, int64_t number) {
    auto out = std::make_unique<CopyingTransfer>(wire, memory, rank, pid, number);
    ASSIGN_OR_RETURN(out->offer_,
                     wire.receive(writable_bytes_of(out->place_), rank, Channel::kPieces, number));
    return std::unique_ptr<PeerTransfer>(std::move(out));
  }

  Status wait() override {
    RETURN_IF_ERROR(offer_->wait());
    RETURN_IF_ERROR(copy_from(pid_, place_, memory_));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (aborted_) return cancelled("aborted");
      ASSIGN_OR_RETURN(copied_, wire_.send(bytes_of(ack_), rank_, Channel::kCopied, number_));
    }
    return copied_->wait();
  }

  void abort() override {
    offer_->abort();
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    if (copied_ != nullptr) copied_->abort();
  }

 private:
  Peers& wire_;
  const MutableBytes memory_;
  const int32_t rank_;
  const int64_t pid_;
  const int64_t number_;
  Place place_;
  std::unique_ptr<PeerTransfer> offer_;
  const uint8_t ack_ = 1;
  std::mutex mutex_;  // Guards the members below.
  bool aborted_ = false;
  std::unique_ptr<PeerTransfer> copied_;
};

class NodePeers : public Peers {
 public:
  NodePeers(std::shared_ptr<Peers> wire, std::map<int32_t, int64_t> pids)
      : wire_(std::move(wire)), pids_(std::move(pids)) {}

  Status connect(std::span<const int32_t> ranks) override;

  void abort() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    for (const auto& transfer : handshakes_) transfer->abort();
  }

  std::string name_of(int32_t rank) const override { return wire_->name_of(rank); }

  Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                             int64_t number) override {
    if (channel != Channel::kPieces || !readers_.contains(rank)) {
      return wire_->send(bytes, rank, channel, number);
    }
    return OfferedTransfer::begin(*wire_, bytes, rank, number);
  }

  Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank, Channel channel,
                                                int64_t number) override {
    if (channel != Channel::kPieces || !readable_.contains(rank)) {
      return wire_->receive(memory, rank, channel, number);
    }
    return CopyingTransfer::begin(*wire_, memory, rank, pids_.at(rank), number);
  }

 private:
  void track(std::unique_ptr<PeerTransfer> transfer);

  const std::shared_ptr<Peers> wire_;
  const std::map<int32_t, int64_t> pids_;
  std::set<int32_t> readable_;  // Ranks whose memory this process can read.
  std::set<int32_t> readers_;   // Ranks that can read this process's memory.

  std::mutex mutex_;  // Guards the members below.
  bool aborted_ = false;
  std::vector<std::unique_ptr<PeerTransfer>> handshakes_;  // Transfers on kHandshake in progress.
};

// Stores a handshake transfer, so that `abort` reaches it.
void NodePeers::track(std::unique_ptr<PeerTransfer> transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) transfer->abort();
  handshakes_.push_back(std::move(transfer));
}

// Every rank sends the address of a random number to the other ranks of its machine. Each of them
// reads the number from the sender's memory and reports whether it matches.
Status NodePeers::connect(std::span<const int32_t> ranks) {
  struct Secret {
    uint64_t address = 0;
    uint64_t value = 0;
  };
  struct NodeRank {
    int32_t rank;
    Secret theirs = {};
    uint8_t seen_by_us = 0;
    uint8_t seen_by_them = 0;
  };
  std::random_device random;
  Secret ours;
  ours.value = (uint64_t{random()} << 32) | random();
  ours.address = place_of(bytes_of(ours.value)).address;
  std::vector<NodeRank> others;
  for (const int32_t rank : ranks) {
    if (pids_.contains(rank)) others.push_back({rank});
  }
  // Sends a message to each of the other ranks, and receives one from each.
  const auto exchange = [&](int64_t number, auto sent, auto received) -> Status {
    struct Ended {  // Ends the transfers before the memory of the messages is freed.
      NodePeers& peers;
      ~Ended() {
        const std::lock_guard<std::mutex> lock(peers.mutex_);
        peers.handshakes_.clear();
      }
    } ended{*this};
    for (NodeRank& other : others) {
      ASSIGN_OR_RETURN(auto in,
                       wire_->receive(received(other), other.rank, Channel::kHandshake, number));
      track(std::move(in));
    }
    for (NodeRank& other : others) {
      ASSIGN_OR_RETURN(auto out, wire_->send(sent(other), other.rank, Channel::kHandshake, number));
      track(std::move(out));
    }
    // What has arrived first: a peer may count a message as sent once it has been waited for here.
    for (const auto& transfer : handshakes_) RETURN_IF_ERROR(transfer->wait());
    return ok_status();
  };
  RETURN_IF_ERROR(exchange(
      0, [&](const NodeRank&) { return bytes_of(ours); },
      [](NodeRank& other) { return writable_bytes_of(other.theirs); }));
  for (NodeRank& other : others) {
    uint64_t found = 0;
    const Place place = {other.theirs.address, sizeof(found)};
    const Status status = copy_from(pids_.at(other.rank), place, writable_bytes_of(found));
    other.seen_by_us = status.ok() && found == other.theirs.value ? 1 : 0;
  }
  RETURN_IF_ERROR(exchange(
      1, [](const NodeRank& other) { return bytes_of(other.seen_by_us); },
      [](NodeRank& other) { return writable_bytes_of(other.seen_by_them); }));
  for (const NodeRank& other : others) {
    if (other.seen_by_us != 0) readable_.insert(other.rank);
    if (other.seen_by_them != 0) readers_.insert(other.rank);
  }
  return ok_status();
}

}  // namespace

std::shared_ptr<Peers> make_node_peers(std::shared_ptr<Peers> wire,
                                       std::map<int32_t, int64_t> pids) {
  return std::make_shared<NodePeers>(std::move(wire), std::move(pids));
}

}  // namespace torch_ckpt
