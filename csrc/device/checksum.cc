#include "device/checksum.h"

#include "device/checksum_lane.h"

namespace torch_ckpt {
namespace {

constexpr Xxh3Constants kConstants;

// In place of the shuffles between the lanes of a warp.
struct SumOverGroups {
  template <typename Part>
  RoundParts operator()(const Part& part) const {
    RoundParts sum;
    for (uint32_t group = 0; group < kStripeGroups; ++group) {
      const RoundParts parts = part(group);
      for (int k = 0; k < kRoundsInFlight; ++k) {
        sum.of[k].even += parts.of[k].even;
        sum.of[k].odd += parts.of[k].odd;
      }
    }
    return sum;
  }
};

}  // namespace

uint64_t sum_block_on_cpu(const SumBlock& block) {
  uint64_t pairs = 0;
  for (uint32_t pair = 0; pair < kPairs; ++pair) {
    pairs += xxh3_of_pair(kConstants, pair, reinterpret_cast<uint64_t>(block.data), block.nbytes,
                          SumOverGroups());
  }
  return xxh3_of_pairs(kConstants, pairs, block.nbytes);
}

}  // namespace torch_ckpt
