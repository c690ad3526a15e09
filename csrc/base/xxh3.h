#pragma once

// XXH3-64, the checksum of everything that our own files state of themselves: of the blocks of data
// files, and of the index. Several times as fast as the CRC-32 that zip prescribes, so that
// checking what is read costs little; not meant against forgery.

#include <cstdint>
#include <memory>

#include "base/bytes.h"

namespace torch_ckpt {

// The checksum of `bytes`, with seed 0.
uint64_t xxh3(Bytes bytes);

// The same for bytes that come in parts. Used by one thread at a time.
class Xxh3Stream {
 public:
  Xxh3Stream();
  Xxh3Stream(Xxh3Stream&&) noexcept;
  Xxh3Stream& operator=(Xxh3Stream&&) noexcept;
  ~Xxh3Stream();

  void update(Bytes bytes);

  // The checksum of all parts so far; the next part begins anew.
  uint64_t finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torch_ckpt
