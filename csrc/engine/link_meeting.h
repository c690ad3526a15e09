#pragma once

// How ranks make the connections of links (engine/announced_peers.h): a byte goes over each, both
// ways. A link may make a connection within its first transfer, and have whoever begins that wait
// for the other end, with nothing that ends the wait: so a thread does it that is left behind when
// the meeting is broken off, with all that it uses.

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "engine/peers.h"

namespace torch_ckpt {

class LinkMeeting {
 public:
  // `up` and `down`: to higher and to lower ranks. `memory`: of two bytes, as they take them.
  LinkMeeting(int32_t rank, std::shared_ptr<Peers> up, std::shared_ptr<Peers> down, Memory memory);

  // Called once. Requires: each of these ranks is about to meet this one, too.
  // Errors: those of the links; kCancelled after `abort`.
  Status meet(std::vector<int32_t> ranks);

  // Ends a `meet`, now or to come. Safe to call from any thread.
  void abort();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torch_ckpt
