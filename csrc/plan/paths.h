#pragma once

// Where the values of a rank's state dict stood, as bytes: DCP's planner_data, which every rank
// sends to the coordinator beside its plan, and which is mostly the same on all ranks.
//
// The body of a frame of wire.h (magic "TCPP", version 1) is a varint, the count of paths, and then
// for each:
//   varint    how many bytes the FQN shares with the beginning of the former FQN
//   word      the rest of the FQN
//   varint    count of keys; not 0
//   ...       for each key, a varint: twice its position in a list, plus 1; or else twice the
//             length of its text, which stands in the FQN: there the keys are joined by dots
//
// The FQNs together are at most kMaxTextGrowth times as long as the bytes up to the end of each.

#include <vector>

#include "base/bytes.h"
#include "base/state_path.h"
#include "base/status.h"

namespace torch_ckpt {

// Errors: kInvalidArgument for a path whose keys, joined by dots, are not its FQN, or that has a
// negative position in a list, or one of 2^62 and more.
Result<std::vector<std::byte>> encode(const std::vector<StatePath>& paths);

// The paths, or kCorruption, or kUnsupported for another version. Any bytes do; the memory that
// they make it take is in proportion to their length.
Result<std::vector<StatePath>> decode_paths(Bytes bytes);

}  // namespace torch_ckpt
