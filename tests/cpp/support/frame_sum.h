#pragma once

// Frames of wire.h whose bytes were changed: what damage does, and, with the checksum made true
// again, what somebody would do who wants to do harm. Also used by fuzz/plan_wire_fuzzer.cc.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/xxh3.h"

namespace torch_ckpt {

// Makes the checksum true again.
inline void fix_sums(std::vector<std::byte>* bytes) {
  if (bytes->size() < sizeof(uint64_t)) return;
  const size_t end = bytes->size() - sizeof(uint64_t);
  store_le(bytes->data() + end, xxh3(Bytes(*bytes).first(end)));
}

}  // namespace torch_ckpt
