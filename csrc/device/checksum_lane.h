#pragma once

// XXH3-64 as a warp computes it: what one lane does, for checksum.cu and, lane after lane, for
// checksum.cc.
//
// XXH3 has eight accumulators. Within each KiB of data (a round: 16 stripes of 64 bytes) it only
// adds to them, so lanes can share a round out and add up what they have; between rounds it
// scrambles them. Two neighbours, a *pair*, never meet other pairs before the end. A lane has pair
// lane % 4 and every eighth stripe of a round, from stripe lane / 4 on.

#include <cstdint>

#include "device/lane.h"

namespace torch_ckpt {

inline constexpr int kStripeNbytes = 64;
inline constexpr int kStripesPerRound = 16;
inline constexpr int kRoundNbytes = kStripeNbytes * kStripesPerRound;
inline constexpr uint32_t kPairs = 4;
inline constexpr uint32_t kStripeGroups = kLanes / kPairs;

// Rounds whose data a lane loads before it waits for the first.
inline constexpr int kRoundsInFlight = 4;

inline constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
inline constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                        0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};

// All numbers that XXH3 starts from. A kernel has them in constant memory.
struct Xxh3Constants {
  uint64_t secret[24] = {
      0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
      0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
      0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
      0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
      0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
      0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
  };
  uint64_t last_stripe[8] = {};  // The secret from byte 121 on,
  uint64_t merge[8] = {};        // and from byte 11 on.
  uint64_t start[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                       kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  uint64_t scramble = kPrime32[0];
  uint64_t length = kPrime64[0];

  constexpr Xxh3Constants() {
    for (int i = 0; i < 8; ++i) {
      last_stripe[i] = secret_at(121 + 8 * i);
      merge[i] = secret_at(11 + 8 * i);
    }
  }

 private:
  constexpr uint64_t secret_at(int byte) const {
    const int shift = 8 * (byte % 8);
    return secret[byte / 8] >> shift | secret[byte / 8 + 1] << (64 - shift);
  }
};

struct AccPair {
  uint64_t even = 0;
  uint64_t odd = 0;
};

// What lanes add up: the sums over their stripes of some rounds.
struct RoundParts {
  AccPair of[kRoundsInFlight];
};

TORCH_CKPT_LANE void add_words(AccPair& acc, uint64_t even, uint64_t odd, const uint64_t* secret) {
  const uint64_t even_key = even ^ secret[0];
  const uint64_t odd_key = odd ^ secret[1];
  acc.even += odd + (even_key & 0xFFFFFFFF) * (even_key >> 32);
  acc.odd += even + (odd_key & 0xFFFFFFFF) * (odd_key >> 32);
}

// Over the stripes of one group, of the first `stripes` of a round.
TORCH_CKPT_LANE AccPair stripes_part(const Xxh3Constants& constants, uint32_t pair, uint32_t group,
                                     uint64_t round, int64_t stripes) {
  const uint64_t word = uint64_t{2} * pair;
  AccPair part;
  for (int64_t s = group; s < stripes; s += kStripeGroups) {
    const auto unit =
        load_unit<Unit16>(round + static_cast<uint64_t>(s * kStripeNbytes) + 8 * word);
    add_words(part, unit.words[0], unit.words[1], constants.secret + s + word);
  }
  return part;
}

// At any address.
TORCH_CKPT_LANE uint64_t load_word(uint64_t address) {
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= uint64_t{load_unit<uint8_t>(address + i)} << (8 * i);
  return word;
}

TORCH_CKPT_LANE uint64_t scrambled(uint64_t acc, uint64_t secret, uint64_t prime) {
  return (acc ^ acc >> 47 ^ secret) * prime;
}

TORCH_CKPT_LANE uint64_t folded_product(uint64_t a, uint64_t b) {
#ifdef __CUDACC__
  return (a * b) ^ __umul64hi(a, b);
#else
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

// What a pair contributes to the checksum of [address, address + nbytes). `sum(f)` gives the sum of
// f(group), RoundParts each, over all groups.
// Requires: nbytes > 240, address % 16 == 0.
template <typename Sum>
TORCH_CKPT_LANE uint64_t xxh3_of_pair(const Xxh3Constants& constants, uint32_t pair,
                                      uint64_t address, int64_t nbytes, const Sum& sum) {
  // All rounds are whole and scrambled but the last, which is not.
  const int64_t last_round = (nbytes - 1) / kRoundNbytes;
  const int64_t last_stripes = (nbytes - 1) % kRoundNbytes / kStripeNbytes;
  const uint64_t word = uint64_t{2} * pair;
  AccPair acc = {constants.start[word], constants.start[word + 1]};
  for (int64_t first = 0; first <= last_round; first += kRoundsInFlight) {
    const RoundParts parts = sum([&](uint32_t group) {
      RoundParts mine;
      for (int k = 0; k < kRoundsInFlight; ++k) {
        const int64_t round = first + k;
        const int64_t stripes = round < last_round    ? int64_t{kStripesPerRound}
                                : round == last_round ? last_stripes
                                                      : 0;
        mine.of[k] = stripes_part(constants, pair, group,
                                  address + static_cast<uint64_t>(round * kRoundNbytes), stripes);
      }
      return mine;
    });
    for (int k = 0; k < kRoundsInFlight; ++k) {
      acc.even += parts.of[k].even;
      acc.odd += parts.of[k].odd;
      if (first + k < last_round) {
        const uint64_t* secret = constants.secret + 16 + word;
        acc = {scrambled(acc.even, secret[0], constants.scramble),
               scrambled(acc.odd, secret[1], constants.scramble)};
      }
    }
  }
  const uint64_t last = address + static_cast<uint64_t>(nbytes - kStripeNbytes) + 8 * word;
  add_words(acc, load_word(last), load_word(last + 8), constants.last_stripe + word);
  return folded_product(acc.even ^ constants.merge[word], acc.odd ^ constants.merge[word + 1]);
}

// The checksum, from the sum of what all pairs contribute.
TORCH_CKPT_LANE uint64_t xxh3_of_pairs(const Xxh3Constants& constants, uint64_t pairs,
                                       int64_t nbytes) {
  uint64_t hash = static_cast<uint64_t>(nbytes) * constants.length + pairs;
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9;
  return hash ^ hash >> 32;
}

}  // namespace torch_ckpt
