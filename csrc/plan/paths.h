#pragma once

// The wire encoding of state dict paths (DCP's planner_data). Every rank sends its paths to the
// coordinator beside its plan. Most ranks send the same paths.
//
// The body is in a frame of wire.h (magic "TCPP", version 1). It is a varint with the number of
// paths, then for each:
//   varint    length of the prefix that the FQN shares with the previous FQN
//   word      the rest of the FQN
//   varint    number of keys; not 0
//   ...       for each key, a varint: 2 * position + 1 for a list position, 2 * length for a dict
//             key. The text of dict keys is in the FQN, which joins all keys with dots
//
// The total length of all FQNs up to a path is at most kMaxTextGrowth times the encoded length up
// to the end of its FQN. Few bytes thus cannot demand much memory.

#include <vector>

#include "base/bytes.h"
#include "base/state_path.h"
#include "base/status.h"

namespace torch_ckpt {

// Encodes paths.
// Errors: kInvalidArgument if a path's keys, joined by dots, are not its FQN, or if a list position
// is negative or at least 2^62.
Result<std::vector<std::byte>> encode(const std::vector<StatePath>& paths);

// Decodes paths. Accepts arbitrary bytes; memory use is proportional to their number.
// Errors: kCorruption; kUnsupported for another version.
Result<std::vector<StatePath>> decode_paths(Bytes bytes);

}  // namespace torch_ckpt
