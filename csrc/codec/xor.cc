#include "codec/xor.h"

#include "base/bytes.h"

namespace torch_ckpt {

void xor_bytes(const std::byte* from, std::byte* to, int64_t nbytes) {
  const auto word = [&](int64_t at) {
    return load_le<uint64_t>(to + at) ^ load_le<uint64_t>(from + at);
  };
  int64_t at = 0;
  for (; at + 32 <= nbytes; at += 32) {
    // All loads come first, so that the compiler uses vectors.
    const uint64_t words[] = {word(at), word(at + 8), word(at + 16), word(at + 24)};
    store_le(to + at, words[0]);
    store_le(to + at + 8, words[1]);
    store_le(to + at + 16, words[2]);
    store_le(to + at + 24, words[3]);
  }
  for (; at < nbytes; ++at) to[at] ^= from[at];
}

}  // namespace torch_ckpt
