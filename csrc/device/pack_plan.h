#pragma once

// The work of a GPU that packs many tensors into one buffer or unpacks them from it. A plan is a
// plain value that stays valid as long as the tensors stay at their addresses.
//
// One copy call per tensor would cost microseconds of CPU time each, and more for strided tensors.
// A plan therefore has tables for one kernel, which execute all copies between tensors and the
// *staging buffer*. The staging buffer is the image of a file, or a range that was read from a
// file. Every warp of the kernel gets about the same amount of work. Large contiguous copies bypass
// the kernel and use copy calls.
//
// A device need not have room for the whole staging buffer: a plan cuts it into *windows*. One
// launch fills or empties one window.

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "base/strided.h"
#include "device/device.h"
#include "device/pack_lane.h"

namespace torch_ckpt {

// Requires: 0 < value < 2^31.
Divisor divisor(int64_t value);

// The alignment of the memory for a window. CUDA allocations have it.
inline constexpr int64_t kStagingAlignment = 256;

enum class PackDirection {
  kPack,    // From tensors to the staging buffer.
  kUnpack,  // From the staging buffer to tensors.
};

// A contiguous tensor that is large enough for a separate copy call.
struct DirectCopy {
  std::byte* tensor = nullptr;
  int64_t staging_offset = 0;
  int64_t nbytes = 0;

  bool operator==(const DirectCopy&) const = default;
};

// Bytes [begin, end) of the staging buffer, and the workers that move them. In a packed window, the
// bytes between copies are unspecified.
struct PackWindow {
  int64_t begin = 0;
  int64_t end = 0;
  int32_t first_worker = 0;
  int32_t worker_end = 0;

  // The staging offset that corresponds to the start of the window's memory. Bytes thus have the
  // same alignment in the window as in the staging buffer.
  int64_t base() const { return align_down(begin, kStagingAlignment); }

  bool operator==(const PackWindow&) const = default;
};

struct PackPlan {
  PackDirection direction = PackDirection::kPack;
  int64_t staging_nbytes = 0;
  int64_t window_nbytes = 0;  // Required memory for one window, in bytes.
  std::vector<DirectCopy> direct;
  std::vector<PackWindow> windows;
  std::vector<PackShape> shapes;
  std::vector<PackChunk> chunks;
  std::vector<int32_t> first_chunk = {0};  // See PackTables.

  PackTables tables() const { return {shapes.data(), chunks.data(), first_chunk.data()}; }

  // Returns the bases for a window whose memory starts at `memory`.
  PackBases bases(const PackWindow& window, const std::byte* memory) const;
};

struct PackOptions {
  int64_t staging_nbytes = 0;
  // Maximum size of a window.
  int64_t window_nbytes = int64_t{32} << 20;
  // Contiguous copies of at least this size use copy calls.
  int64_t direct_nbytes = int64_t{1} << 20;
  // Number of warps that a device runs concurrently; need not be exact.
  int32_t workers = 8192;
};

// Makes a plan.
// Requires: the tensors' sides are valid memory; as destinations, they do not overlap.
// Errors: kInvalidArgument in four cases. A copy's staging side is outside the buffer. Elements of
// a copy overlap in the staging buffer. Two copies overlap there (kPack only, counted from first to
// last byte). A window is smaller than one unit.
Result<PackPlan> plan_pack(PackDirection direction, std::span<const TensorCopy> copies,
                           const PackOptions& options);

}  // namespace torch_ckpt
