#pragma once

// Peers of which some are processes of this machine: those copy what they are sent straight out of
// the sender's memory. Only where it lies goes over the wire, which costs a multiple of the copy
// within a machine.

#include <cstdint>
#include <map>
#include <memory>

#include "engine/exchange/peers.h"

namespace torch_ckpt {

// `pids` are those of other ranks of this machine, by rank, as this process sees them. Where the
// system does not let one process read the other's memory, or a pid is another's, the bytes
// themselves go over the wire.
//
// A rank that fails may let go of memory that another is about to copy. What that one has then is
// of no use; that it does not count as loaded is for those who gather the errors of all ranks.
std::shared_ptr<Peers> make_node_peers(std::shared_ptr<Peers> wire,
                                       std::map<int32_t, int64_t> pids);

}  // namespace torch_ckpt
