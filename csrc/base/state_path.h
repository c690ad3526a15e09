#pragma once

// Where a value stood in a nested state dict. Plans carry it between ranks, and the index keeps it.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace torch_ckpt {

// The keys of dicts and positions in lists from the root to the value of an FQN.
struct StatePath {
  std::string fqn;
  std::vector<std::variant<std::string, int64_t>> keys;

  bool operator==(const StatePath&) const = default;
};

}  // namespace torch_ckpt
