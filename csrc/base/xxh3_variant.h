#pragma once

// XXH3, compiled for the instruction set of the including file: the baseline in xxh3.cc, AVX2 in
// xxh3_avx2.cc. All definitions are file-local, so the linker cannot replace a baseline function
// with an AVX2 one. For the same reason this header includes no C++ header.

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
  XXH128_hash_t (*hash_128)(const void* data, size_t nbytes);
  XXH128_hash_t (*digest_128)(const XXH3_state_t* state);
};

namespace {

const Xxh3Variant kXxh3OfThisFile = {
    [](const void* data, size_t nbytes) { return uint64_t{XXH3_64bits(data, nbytes)}; },
    [](XXH3_state_t* state) { (void)XXH3_64bits_reset(state); },
    [](XXH3_state_t* state, const void* data, size_t nbytes) {
      (void)XXH3_64bits_update(state, data, nbytes);
    },
    [](const XXH3_state_t* state) { return uint64_t{XXH3_64bits_digest(state)}; },
    [](const void* data, size_t nbytes) { return XXH3_128bits(data, nbytes); },
    // The state is the same for both lengths.
    [](const XXH3_state_t* state) { return XXH3_128bits_digest(state); },
};

}  // namespace

// Returns null if the compiler or the CPU does not support AVX2.
const Xxh3Variant* xxh3_avx2();

}  // namespace torch_ckpt
