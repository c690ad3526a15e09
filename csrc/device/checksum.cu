// Sums blocks of data, a warp each: checksum.h, on a GPU.

#include "device/checksum_lane.h"
#include "device/kernels.h"

namespace torch_ckpt {
namespace {

constexpr int32_t kWarpsPerBlock = 4;
constexpr unsigned kAllLanes = 0xFFFFFFFF;

__constant__ Xxh3Constants constants = Xxh3Constants();

__device__ uint64_t sum_with(uint64_t value, int lane_distance) {
  return value + __shfl_xor_sync(kAllLanes, value, lane_distance);
}

// Lanes of one pair differ in the bits of their number above the lowest two.
struct SumOverGroups {
  uint32_t group;

  template <typename Part>
  __device__ RoundParts operator()(const Part& part) const {
    RoundParts parts = part(group);
    for (int k = 0; k < kRoundsInFlight; ++k) {
      for (int distance = kPairs; distance < static_cast<int>(kLanes); distance *= 2) {
        parts.of[k].even = sum_with(parts.of[k].even, distance);
        parts.of[k].odd = sum_with(parts.of[k].odd, distance);
      }
    }
    return parts;
  }
};

__global__ void sum_kernel(const SumBlock* blocks, int32_t count, uint64_t* sums) {
  const uint32_t lane = threadIdx.x % kLanes;
  const auto warp = static_cast<int32_t>(threadIdx.x / kLanes);
  const int32_t index = static_cast<int32_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (index >= count) return;
  const SumBlock block = blocks[index];
  uint64_t pairs = xxh3_of_pair(constants, lane % kPairs, reinterpret_cast<uint64_t>(block.data),
                                block.nbytes, SumOverGroups{lane / kPairs});
  for (int distance = 1; distance < static_cast<int>(kPairs); distance *= 2) {
    pairs = sum_with(pairs, distance);
  }
  if (lane == 0) sums[index] = xxh3_of_pairs(constants, pairs, block.nbytes);
}

}  // namespace

cudaError_t launch_sums(const SumBlock* blocks, int32_t count, uint64_t* sums,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>((count + kWarpsPerBlock - 1) / kWarpsPerBlock);
  sum_kernel<<<grid, kWarpsPerBlock * kLanes, 0, stream>>>(blocks, count, sums);
  return cudaGetLastError();
}

}  // namespace torch_ckpt
