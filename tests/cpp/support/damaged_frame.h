#pragma once

// What every decoder of a frame of wire.h must do with frames that are damaged or made up.

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "support/frame_sum.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt {

// A flipped bit, another length, another version. Requires: `bytes` are sound.
template <typename Decode>
void expect_damage_is_refused(const std::vector<std::byte>& bytes, Decode decode) {
  ASSERT_OK(decode(bytes));
  for (size_t at = 0; at < 8 * bytes.size(); ++at) {
    std::vector<std::byte> damaged = bytes;
    damaged[at / 8] ^= std::byte{1} << at % 8;
    ASSERT_CODE(decode(damaged), StatusCode::kCorruption) << "bit " << at;
  }
  for (size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
    std::vector<std::byte> cut = bytes;
    cut.resize(nbytes);
    ASSERT_CODE(decode(cut), StatusCode::kCorruption) << nbytes << " bytes";
    fix_sums(&cut);
    ASSERT_CODE(decode(cut), StatusCode::kCorruption) << nbytes << " sealed bytes";
  }
  std::vector<std::byte> longer = bytes;
  longer.insert(longer.end() - sizeof(uint64_t), std::byte{0});
  fix_sums(&longer);
  EXPECT_CODE(decode(longer), StatusCode::kCorruption);
  std::vector<std::byte> newer = bytes;
  newer[4] = std::byte{200};
  fix_sums(&newer);
  EXPECT_CODE(decode(newer), StatusCode::kUnsupported);
}

// With true checksums, whatever stands behind them: each single flipped bit, and some thousand
// changes of a few bytes. What is not refused is given to `expect_sound`, with the bytes.
template <typename Decode, typename Check>
void expect_nonsense_is_refused(const std::vector<std::byte>& bytes, Decode decode,
                                Check expect_sound) {
  constexpr int64_t kHeadNbytes = 8;
  const int64_t body = std::ssize(bytes) - kHeadNbytes - 8;
  int64_t refused = 0;
  const auto look_at = [&](std::vector<std::byte> odd) {
    fix_sums(&odd);
    const auto decoded = decode(odd);
    if (decoded.ok()) return expect_sound(*decoded, odd);
    ++refused;
    ASSERT_CODE(decoded, StatusCode::kCorruption);
  };
  for (int64_t bit = 0; bit < 8 * body; ++bit) {
    SCOPED_TRACE("bit " + std::to_string(bit) + " of the body");
    std::vector<std::byte> odd = bytes;
    odd[static_cast<size_t>(kHeadNbytes + bit / 8)] ^= std::byte{1} << bit % 8;
    ASSERT_NO_FATAL_FAILURE(look_at(std::move(odd)));
  }
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<std::byte> odd = bytes;
    for (int64_t change = 1 + pick(random, 3); change > 0; --change) {
      odd[static_cast<size_t>(kHeadNbytes + pick(random, body))] =
          static_cast<std::byte>(pick(random, 256));
    }
    ASSERT_NO_FATAL_FAILURE(look_at(std::move(odd)));
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace torch_ckpt
