#pragma once

// The ranks that this one exchanges bytes with. The engine knows no process group: the binding
// layer makes one into `Peers`, and a test threads of one process.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Bytes on their way to or from a peer. While it exists, its memory belongs to it.
class PeerTransfer {
 public:
  virtual ~PeerTransfer() = default;

  // Returns when the bytes have left or come. Called once.
  // Errors: kCancelled when it was aborted, the peer is gone, or nothing has moved for too long.
  virtual Status wait() = 0;

  // Ends a `wait`, now or to come. Safe to call from any thread.
  virtual void abort() = 0;
};

// What is sent between two ranks.
enum class Channel : uint8_t {
  kPieces,
  kEnd,      // Received for as long as it takes: when the peer is gone, this is sure to fail.
  kMeeting,  // How two ranks of a node find each other's memory.
  kCopied,   // What one has copied out of the other's.
};
inline constexpr int kChannels = 4;

// Each function may be called from any thread. Both ends give a transfer the same number, which no
// other has of those from the one rank to the other on this channel: they go in any order.
class Peers {
 public:
  virtual ~Peers() = default;

  // Comes before any transfer but those of kEnd. Each of these ranks has this one among its own.
  // Errors: kCancelled, also after `abort`.
  virtual Status meet(std::span<const int32_t> /*ranks*/) { return ok_status(); }

  // Ends a `meet`, now or to come. Safe to call from any thread.
  virtual void abort() {}

  // What people call a rank: those that exchange count themselves.
  virtual std::string name_of(int32_t rank) const { return str_cat("rank ", rank); }

  virtual Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                                     int64_t number) = 0;
  virtual Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank,
                                                        Channel channel, int64_t number) = 0;
};

}  // namespace torch_ckpt
