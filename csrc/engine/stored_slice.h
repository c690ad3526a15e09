#pragma once

// StoredSlice: the place of one value in a checkpoint's files.

#include <cstdint>
#include <string>

namespace torch_ckpt {

// One slice of a data file. `name` is its FQN, for messages; empty if it is unknown.
struct StoredSlice {
  std::string file;  // Relative to the checkpoint's directory.
  int64_t offset = 0;
  int64_t nbytes = 0;
  std::string name;
};

}  // namespace torch_ckpt
