#pragma once

// XXH3-64, the checksum of data file blocks, the index and encoded plans, and XXH3-128, the digest
// of values. XXH3 is several times faster than the CRC-32 of the zip format. It detects damage, not
// forgery.

#include <cstdint>
#include <memory>

#include "base/bytes.h"

namespace torch_ckpt {

// Returns the checksum of `bytes`, with seed 0.
uint64_t xxh3(Bytes bytes);

struct Digest128 {
  uint64_t low = 0;
  uint64_t high = 0;

  bool operator==(const Digest128&) const = default;
};

// Returns the XXH3-128 of `bytes`, with seed 0.
Digest128 xxh3_128(Bytes bytes);

// The incremental form of both. Used by one thread at a time.
class Xxh3Stream {
 public:
  Xxh3Stream();
  Xxh3Stream(Xxh3Stream&&) noexcept;
  Xxh3Stream& operator=(Xxh3Stream&&) noexcept;
  ~Xxh3Stream();

  void update(Bytes bytes);

  // Returns the checksum of all bytes since the last `finish`, and starts over.
  uint64_t finish();
  Digest128 finish_128();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torch_ckpt
