#pragma once

// Bytes in the memory of somebody else: of a writer whose object is being uploaded, or of the
// client of a store that has received them.

#include <memory>

#include "base/bytes.h"

namespace torch_ckpt {

// The bytes stay valid until `lease` is destroyed.
struct Window {
  Bytes bytes;
  std::shared_ptr<void> lease;
};

}  // namespace torch_ckpt
