#pragma once

// NodePeers: Peers of which some are processes of this machine. Within the machine, the receiver
// copies bytes directly from the sender's memory, and only their address goes over the wire. A
// loopback transfer of the bytes would cost several times as much.

#include <cstdint>
#include <map>
#include <memory>

#include "engine/exchange/peers.h"

namespace torch_ckpt {

// `pids` maps ranks of this machine to their process ids in this process's pid namespace. If the
// system denies access to a process's memory, or a pid belongs to another process, the bytes go
// over `wire`.
//
// A rank that fails may free memory that another rank is about to copy. The copy is then invalid.
// The caller gathers the errors of all ranks, and must discard the load if any rank failed.
std::shared_ptr<Peers> make_node_peers(std::shared_ptr<Peers> wire,
                                       std::map<int32_t, int64_t> pids);

}  // namespace torch_ckpt
