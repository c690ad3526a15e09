#pragma once

// A link between ranks that are threads of the test, as strict as NCCL's between GPUs: between two
// ranks transfers are matched in the order in which each end has begun them, whatever their
// numbers; one that the other end does not match holds up all behind it; that the other end is gone
// goes unnoticed. Bytes move when both ends wait for them. Two ends that both send fail: on a GPU
// they would wait for ever.

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "engine/peers.h"
#include "support/later_device.h"

namespace torch_ckpt {

class OrderedNetwork {
 public:
  explicit OrderedNetwork(uint32_t seed = 0) : random_(seed) {}

  std::shared_ptr<Peers> peers_of(int32_t rank) { return std::make_shared<PeersOf>(*this, rank); }

  // The most transfers that one rank had going with another at a time.
  size_t most_queued() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return most_queued_;
  }
  int64_t sent_nbytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return sent_nbytes_;
  }

 private:
  struct State {
    bool sends;
    MutableBytes memory;
    bool awaited = false;
    bool done = false;
    bool failed = false;
  };
  using Queue = std::deque<std::shared_ptr<State>>;
  using Pair = std::array<Queue, 2>;  // Of the lower rank and of the higher one.

  class TransferOf : public PeerTransfer {
   public:
    TransferOf(OrderedNetwork& network, Pair& pair, std::shared_ptr<State> state)
        : network_(network), pair_(pair), state_(std::move(state)) {}
    ~TransferOf() override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      for (Queue& queue : pair_) std::erase(queue, state_);
    }

    Status wait() override {
      network_.dawdle();
      std::unique_lock<std::mutex> lock(network_.mutex_);
      state_->awaited = true;
      network_.move(pair_);
      network_.changed_.wait(lock, [&] { return state_->done || state_->failed; });
      return state_->done ? ok_status() : cancelled("aborted");
    }

    void abort() override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      state_->failed = true;
      network_.changed_.notify_all();
    }

   private:
    OrderedNetwork& network_;
    Pair& pair_;
    const std::shared_ptr<State> state_;
  };

  class PeersOf : public Peers {
   public:
    PeersOf(OrderedNetwork& network, int32_t rank) : network_(network), rank_(rank) {}
    Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel,
                                               int64_t) override {
      return network_.begin(rank_, rank, true,
                            {const_cast<std::byte*>(bytes.data()), bytes.size()});
    }
    Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank, Channel,
                                                  int64_t) override {
      return network_.begin(rank_, rank, false, memory);
    }

   private:
    OrderedNetwork& network_;
    const int32_t rank_;
  };

  // Lets other threads go first, now and then.
  void dawdle() {
    bool yields;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      yields = random_() % 4 == 0;
    }
    if (yields) std::this_thread::yield();
  }

  std::unique_ptr<PeerTransfer> begin(int32_t self, int32_t other, bool sends,
                                      MutableBytes memory) {
    dawdle();
    const std::lock_guard<std::mutex> lock(mutex_);
    Pair& pair = pairs_[std::minmax(self, other)];
    auto state = std::make_shared<State>(State{sends, memory});
    Queue& queue = pair[self < other ? 0 : 1];
    queue.push_back(state);
    most_queued_ = std::max(most_queued_, queue.size());
    return std::make_unique<TransferOf>(*this, pair, std::move(state));
  }

  // Carries out what both ends of a pair have come to, and wait for.
  void move(Pair& pair) {
    while (!pair[0].empty() && !pair[1].empty()) {
      State& low = *pair[0].front();
      State& high = *pair[1].front();
      if (low.sends == high.sends || low.memory.size() != high.memory.size()) {
        low.failed = high.failed = true;
        break;
      }
      if (!low.awaited || !high.awaited) break;
      State& from = low.sends ? low : high;
      State& to = low.sends ? high : low;
      std::memcpy(LaterDevice::near(to.memory.data()), LaterDevice::near(from.memory.data()),
                  to.memory.size());
      sent_nbytes_ += ssize(to.memory);
      from.done = to.done = true;
      for (Queue& queue : pair) queue.pop_front();
    }
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_;
  std::map<std::pair<int32_t, int32_t>, Pair> pairs_;
  size_t most_queued_ = 0;
  int64_t sent_nbytes_ = 0;
};

}  // namespace torch_ckpt
