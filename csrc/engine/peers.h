#pragma once

// The ranks that this one exchanges bytes with. The engine knows no process group: the binding
// layer makes one into `Peers`, and a test threads of one process.

#include <cstdint>
#include <memory>

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

// What is sent between two ranks. Transfers of one kind come in the order in which both have begun
// them.
enum class Channel : uint8_t {
  kPieces,
  kEnd,  // Received for as long as it takes: when the peer is gone, this is what is sure to fail.
};

// Each function may be called from any thread, but one rank is sent to, or received from, by one
// thread at a time.
class Peers {
 public:
  virtual ~Peers() = default;

  virtual Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank,
                                                     Channel channel) = 0;
  virtual Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank,
                                                        Channel channel) = 0;
};

}  // namespace torch_ckpt
