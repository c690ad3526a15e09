#pragma once

// What headers need that a kernel and plain C++ share. Such a header says what one lane of a warp
// does: a `.cu` file includes it for the GPU, a `.cc` file for a loop over all lanes, so that the
// arithmetic of a kernel is tested where there is no GPU.

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TORCH_CKPT_LANE __device__ inline
#else
#define TORCH_CKPT_LANE inline
#endif

namespace torch_ckpt {

// Threads of a warp, which run in step.
inline constexpr uint32_t kLanes = 32;

// The most that one instruction moves.
struct alignas(16) Unit16 {
  uint64_t words[2];
};

// Loads and stores at multiples of the unit's size, each of them one instruction. Tables of kernels
// hold addresses as numbers.
// NOLINTBEGIN(performance-no-int-to-ptr)
template <typename Unit>
TORCH_CKPT_LANE Unit load_unit(uint64_t address) {
#ifdef __CUDACC__
  return *reinterpret_cast<const Unit*>(address);
#else
  Unit unit;
  std::memcpy(&unit, __builtin_assume_aligned(reinterpret_cast<const void*>(address), sizeof(Unit)),
              sizeof(Unit));
  return unit;
#endif
}

template <typename Unit>
TORCH_CKPT_LANE void store_unit(uint64_t address, const Unit& unit) {
#ifdef __CUDACC__
  *reinterpret_cast<Unit*>(address) = unit;
#else
  std::memcpy(__builtin_assume_aligned(reinterpret_cast<void*>(address), sizeof(Unit)), &unit,
              sizeof(Unit));
#endif
}
// NOLINTEND(performance-no-int-to-ptr)

}  // namespace torch_ckpt
