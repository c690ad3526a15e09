#pragma once

// Peers whose pieces go over a link that knows no numbers, as NCCL's: what one rank puts on it for
// another is matched in the order in which both put it there, and until both have, whatever comes
// behind it waits. Words over a wire, which knows numbers, see to it that both have the same order,
// and that nothing is put on the link that the other end is not about to take.
//
// What a rank receives, it has room for: it says so with a word when it begins to (kRoom). A rank
// that sends takes any of the pieces that are there and have room, says which (kNext), puts it on
// the link, and takes the next when that is done. The other end listens for one such word after
// another, and does what each says.
//
// Why nobody waits for ever. A link has one direction of one pair only: `up` goes to higher ranks,
// `down` to lower ones. So
//  1. on each link both ends have the same order, that of the words kNext;
//  2. what is put on a link lies ready at one end and has room at the other, and nothing else is
//     under way there: both ends put it there whatever else they wait for, and it ends;
//  3. a piece that lies ready and has room waits only for others such, of the same link, and each
//     of those ends by (2).
// Room is given in the order of pieces, which is that of all ranks (engine/exchange_stream.h). So
// of all pieces that are not done, the first has room wherever it belongs; by (3) it goes on; and
// no circle of ranks waits for each other's memory. This needs neither that pieces go in their
// order, nor that a GPU begins what it is given while other work of it waits: nothing is ever put
// behind a transfer that has not ended.

#include <cstdint>
#include <memory>

#include "base/memory.h"
#include "engine/peers.h"

namespace torch_ckpt {

// `rank`: this one. Each of the links carries pieces alone, and is used by one thread for each rank
// at a time, which waits for each transfer before it begins the next. Their connections are made
// when ranks meet (engine/link_meeting.h), with `memory`, of two bytes.
//
// Two threads for each rank that pieces go to, and one for each that they come from. When a
// transfer fails, or is aborted, all do: who leaves one out has lost the order.
std::shared_ptr<Peers> make_announced_peers(int32_t rank, std::shared_ptr<Peers> wire,
                                            std::shared_ptr<Peers> up, std::shared_ptr<Peers> down,
                                            Memory memory);

}  // namespace torch_ckpt
