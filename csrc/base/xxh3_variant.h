#pragma once

// XXH3 as the including file's instruction set makes it: xxh3.cc includes this plainly,
// xxh3_avx2.cc with more instructions allowed. Everything here is local to its file, so that no
// function that was compiled for a newer processor is ever linked in place of a plain one; and it
// includes no C++ header that could define any.

#define XXH_INLINE_ALL
#include <stddef.h>
#include <stdint.h>
#include <xxhash.h>

namespace torch_ckpt {

struct Xxh3Variant {
  uint64_t (*hash)(const void* data, size_t nbytes);
  void (*reset)(XXH3_state_t* state);
  void (*update)(XXH3_state_t* state, const void* data, size_t nbytes);
  uint64_t (*digest)(const XXH3_state_t* state);
};

namespace {

const Xxh3Variant kXxh3OfThisFile = {
    [](const void* data, size_t nbytes) { return uint64_t{XXH3_64bits(data, nbytes)}; },
    [](XXH3_state_t* state) { (void)XXH3_64bits_reset(state); },
    [](XXH3_state_t* state, const void* data, size_t nbytes) {
      (void)XXH3_64bits_update(state, data, nbytes);
    },
    [](const XXH3_state_t* state) { return uint64_t{XXH3_64bits_digest(state)}; },
};

}  // namespace

// Null where the compiler or the machine has no such instructions.
const Xxh3Variant* xxh3_avx2();

}  // namespace torch_ckpt
