#pragma once

// What a GPU has to do to bring many tensors into one buffer, or out of it: as a plain value, made
// once and used as often as the tensors stay where they are.
//
// A copy call a tensor would cost microseconds of a thread each, and more for tensors that are
// strided. So all copies between tensors and the *staging buffer* (the image of a file, or a part
// of a file that was read) become tables for one kernel, which shares them out so that every warp
// has about as much to move. Only what is large and contiguous is left to copy calls, which then
// move it without the kernel.
//
// A device need not hold the whole staging buffer: a plan cuts it into *windows*, each of which one
// launch fills or empties.

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "base/strided.h"
#include "device/device.h"
#include "device/pack_lane.h"

namespace torch_ckpt {

// The memory that holds a window starts at a multiple of this, as that which CUDA gives does.
inline constexpr int64_t kStagingAlignment = 256;

enum class PackDirection {
  kPack,    // From tensors to the staging buffer.
  kUnpack,  // From the staging buffer to tensors.
};

// A contiguous tensor that is worth a copy call of its own.
struct DirectCopy {
  std::byte* tensor = nullptr;
  int64_t staging_offset = 0;
  int64_t nbytes = 0;

  bool operator==(const DirectCopy&) const = default;
};

// Bytes [begin, end) of the staging buffer, and the workers that move what lies there. Of a window
// that was packed, bytes between copies are nobody's.
struct PackWindow {
  int64_t begin = 0;
  int64_t end = 0;
  int32_t first_worker = 0;
  int32_t worker_end = 0;

  // The offset that the start of the window's memory stands for, so that what is aligned in the
  // staging buffer is in the window.
  int64_t base() const { return align_down(begin, kStagingAlignment); }

  bool operator==(const PackWindow&) const = default;
};

struct PackPlan {
  PackDirection direction = PackDirection::kPack;
  int64_t staging_nbytes = 0;
  int64_t window_nbytes = 0;  // What the memory for a window has to hold.
  std::vector<DirectCopy> direct;
  std::vector<PackWindow> windows;
  std::vector<PackShape> shapes;
  std::vector<PackChunk> chunks;
  std::vector<int32_t> first_chunk = {0};  // See PackTables.

  PackTables tables() const { return {shapes.data(), chunks.data(), first_chunk.data()}; }

  // For a window whose memory begins at `memory`.
  PackBases bases(const PackWindow& window, const std::byte* memory) const;
};

struct PackOptions {
  int64_t staging_nbytes = 0;
  // The most that a device holds of the staging buffer at a time.
  int64_t window_nbytes = int64_t{32} << 20;
  // Contiguous copies of at least as much are left out of the kernel.
  int64_t direct_nbytes = int64_t{1} << 20;
  // Warps that a device can have at work at once; a few more or less cost little.
  int32_t workers = 8192;
};

// Requires of the caller: the tensors' sides lie in memory; where they are destinations, they do
// not overlap. kInvalidArgument where that of a staging side is not so: outside of the buffer, two
// elements in one place, or with kPack two copies (counted from first to last byte) in one; and
// where what one instruction moves does not fit into a window.
Result<PackPlan> plan_pack(PackDirection direction, std::span<const TensorCopy> copies,
                           const PackOptions& options);

}  // namespace torch_ckpt
