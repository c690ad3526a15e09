#pragma once

// Definitions for headers that kernels and plain C++ share. Such a header defines the work of one
// lane of a warp. A `.cu` file compiles it for the GPU, a `.cc` file into a loop over all lanes, so
// a kernel's arithmetic is tested without a GPU.

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TORCH_CKPT_LANE __device__ inline
#else
#define TORCH_CKPT_LANE inline
#endif

namespace torch_ckpt {

// Number of threads in a warp.
inline constexpr uint32_t kLanes = 32;

// The largest unit that one instruction moves.
struct alignas(16) Unit16 {
  uint64_t words[2];
};

// Loads and stores at multiples of the unit's size, one instruction each. Kernel tables store
// addresses as integers.
//
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
