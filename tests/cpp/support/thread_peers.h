#pragma once

// Ranks that are threads of the test. As over a wire, bytes go when both have begun their transfer,
// and a rank that has hung up fails whatever is begun with it.

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "engine/exchange/peers.h"

namespace torch_ckpt {

class PeerNetwork {
 public:
  std::shared_ptr<Peers> peers_of(int32_t rank) { return std::make_shared<PeersOf>(*this, rank); }

  // Fails all transfers with a rank, begun or to come.
  void hang_up(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    gone_.insert(rank);
    changed_.notify_all();
  }

  int64_t sent_nbytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return sent_nbytes_;
  }

 private:
  struct Link {
    int32_t from;
    int32_t to;
    Channel channel;
    int64_t number;
    auto operator<=>(const Link&) const = default;
  };

  struct State {
    MutableBytes memory;
    bool done = false;
    bool aborted = false;
  };
  struct Waiting {
    std::deque<std::shared_ptr<State>> sends;
    std::deque<std::shared_ptr<State>> receives;
  };

  class TransferOf : public PeerTransfer {
   public:
    TransferOf(PeerNetwork& network, Link link, std::shared_ptr<State> state)
        : network_(network), link_(link), state_(std::move(state)) {}
    ~TransferOf() override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      Waiting& waiting = network_.waiting_[link_];
      std::erase(waiting.sends, state_);
      std::erase(waiting.receives, state_);
    }

    Status wait() override {
      std::unique_lock<std::mutex> lock(network_.mutex_);
      const auto gone = [&] {
        return network_.gone_.contains(link_.from) || network_.gone_.contains(link_.to);
      };
      network_.changed_.wait(lock, [&] { return state_->done || state_->aborted || gone(); });
      if (state_->done) return ok_status();
      return cancelled(state_->aborted ? "aborted" : "the peer is gone");
    }

    void abort() override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      state_->aborted = true;
      network_.changed_.notify_all();
    }

   private:
    PeerNetwork& network_;
    const Link link_;
    const std::shared_ptr<State> state_;
  };

  class PeersOf : public Peers {
   public:
    PeersOf(PeerNetwork& network, int32_t rank) : network_(network), rank_(rank) {}
    Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                               int64_t number) override {
      const MutableBytes memory(const_cast<std::byte*>(bytes.data()), bytes.size());
      return network_.begin({rank_, rank, channel, number}, memory, &Waiting::sends);
    }
    Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank,
                                                  Channel channel, int64_t number) override {
      return network_.begin({rank, rank_, channel, number}, memory, &Waiting::receives);
    }

   private:
    PeerNetwork& network_;
    const int32_t rank_;
  };

  std::unique_ptr<PeerTransfer> begin(Link link, MutableBytes memory,
                                      std::deque<std::shared_ptr<State>> Waiting::*side) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto state = std::make_shared<State>(State{memory});
    Waiting& waiting = waiting_[link];
    (waiting.*side).push_back(state);
    while (!waiting.sends.empty() && !waiting.receives.empty()) {
      State& from = *waiting.sends.front();
      State& to = *waiting.receives.front();
      if (from.memory.size() != to.memory.size()) break;  // Never done: the test ends by its limit.
      std::memcpy(to.memory.data(), from.memory.data(), to.memory.size());
      if (link.channel == Channel::kPieces) sent_nbytes_ += ssize(to.memory);
      from.done = to.done = true;
      waiting.sends.pop_front();
      waiting.receives.pop_front();
    }
    changed_.notify_all();
    return std::make_unique<TransferOf>(*this, link, std::move(state));
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Link, Waiting> waiting_;
  std::set<int32_t> gone_;
  int64_t sent_nbytes_ = 0;
};

}  // namespace torch_ckpt
