#include "engine/link_meeting.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

namespace torch_ckpt {

struct LinkMeeting::State {
  int32_t rank;
  std::shared_ptr<Peers> up;
  std::shared_ptr<Peers> down;
  Memory memory;

  std::mutex mutex = {};  // Guards what follows.
  std::condition_variable changed = {};
  bool aborted = false;
  PeerTransfer* going = nullptr;
  std::optional<Status> met = std::nullopt;  // How it has ended.

  Status run(const std::function<Result<std::unique_ptr<PeerTransfer>>()>& begin);
  Status meet(const std::vector<int32_t>& ranks);
};

LinkMeeting::LinkMeeting(int32_t rank, std::shared_ptr<Peers> up, std::shared_ptr<Peers> down,
                         Memory memory)
    : state_(new State{rank, std::move(up), std::move(down), std::move(memory)}) {}

Status LinkMeeting::State::run(
    const std::function<Result<std::unique_ptr<PeerTransfer>>()>& begin) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (aborted) return cancelled("aborted");
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<PeerTransfer> transfer, begin());
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (aborted) transfer->abort();
    going = transfer.get();
  }
  Status status = transfer->wait();
  const std::lock_guard<std::mutex> lock(mutex);
  going = nullptr;
  return aborted ? cancelled("aborted") : status;
}

// Of all pairs that have not met, the first has both ends at it: those that either has before it
// have. So no circle of ranks waits, however a link makes its connections.
Status LinkMeeting::State::meet(const std::vector<int32_t>& ascending) {
  const MutableBytes first = slice(memory.bytes(), 0, 1);
  const MutableBytes second = slice(memory.bytes(), 1, 1);
  for (const int32_t other : ascending) {
    const auto send = [&](Peers& link) { return link.send(first, other, Channel::kPieces, 0); };
    const auto receive = [&](Peers& link) {
      return link.receive(second, other, Channel::kPieces, 0);
    };
    if (other > rank) {
      RETURN_IF_ERROR(run([&] { return send(*up); }));
      RETURN_IF_ERROR(run([&] { return receive(*down); }));
    } else {
      RETURN_IF_ERROR(run([&] { return receive(*up); }));
      RETURN_IF_ERROR(run([&] { return send(*down); }));
    }
  }
  return ok_status();
}

Status LinkMeeting::meet(std::vector<int32_t> ranks) {
  std::ranges::sort(ranks);
  std::thread([state = state_, ranks = std::move(ranks)] {
    Status status;
    try {
      status = state->meet(ranks);
    } catch (const std::exception& error) {
      status = internal_error("cannot link ranks: ", error.what());
    }
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->met = std::move(status);
    state->changed.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->aborted || state_->met; });
  return state_->aborted ? cancelled("aborted") : *state_->met;
}

void LinkMeeting::abort() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->aborted = true;
  if (state_->going != nullptr) state_->going->abort();
  state_->changed.notify_all();
}

}  // namespace torch_ckpt
