#pragma once

// Peers: the interface through which a rank exchanges bytes with other ranks. The binding layer
// implements it with a process group, and the tests with threads of one process.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// A transfer to or from a peer. Has exclusive use of its memory for its lifetime.
class PeerTransfer {
 public:
  virtual ~PeerTransfer() = default;

  // Waits until the bytes are sent or received. Called once. A send may end only once the peer
  // waits for the bytes, except on kCopied.
  // Errors: kCancelled after an abort, if the peer is gone, or after the transfer's timeout.
  virtual Status wait() = 0;

  // Ends the current `wait`, and any later one. Safe to call from any thread.
  virtual void abort() = 0;
};

// Purpose of a transfer between two ranks.
enum class Channel : uint8_t {
  kPieces,     // Pieces of files, or the addresses of pieces on the same node.
  kEnd,        // End of the exchange. Has no timeout, and fails when the peer is gone.
  kHandshake,  // Test of access to each other's memory, for two ranks of a node.
  kCopied,     // Acknowledgement of a piece copied from the sender's memory. Itself has none.
};
inline constexpr int kChannels = 4;

// Safe to use from any thread. Both ends give a transfer the same number, which is unique among the
// transfers from one rank to the other on one channel. Transfers may complete in any order.
class Peers {
 public:
  virtual ~Peers() = default;

  // Prepares for transfers with `ranks`. Call before any transfer except those on kEnd.
  // Requires: each of `ranks` lists this rank in its own call. Errors: kCancelled, also after
  // `abort`.
  virtual Status connect(std::span<const int32_t> /*ranks*/) { return ok_status(); }

  // Aborts the preparation, in progress or later. Safe to call from any thread.
  virtual void abort() {}

  // The name of a rank in messages. `rank` counts the ranks of the exchange, so the user's rank may
  // differ.
  virtual std::string name_of(int32_t rank) const { return str_cat("rank ", rank); }

  virtual Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                                     int64_t number) = 0;
  virtual Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank,
                                                        Channel channel, int64_t number) = 0;
};

}  // namespace torch_ckpt
