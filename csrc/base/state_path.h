#pragma once

// The path of a value in a nested state dict. Plans send paths between ranks; the index stores
// them.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace torch_ckpt {

// The dict keys and list positions that lead from the root of the state dict to one FQN.
struct StatePath {
  std::string fqn;
  std::vector<std::variant<std::string, int64_t>> keys;

  bool operator==(const StatePath&) const = default;
};

}  // namespace torch_ckpt
