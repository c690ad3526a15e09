#pragma once

// The tables of a pack kernel, and the work of one lane of a warp. `pack_plan` makes the tables,
// `pack.cu` executes them on a GPU, and tests execute them on the CPU.
//
// Each warp is a *worker* with a run of *chunks*. A chunk consists of units (1 to 16 bytes, moved
// by one instruction) of a strided region. Chunks of one region share its *shape*.

#include <cstdint>

#include "device/lane.h"

namespace torch_ckpt {

// The plan splits copies that have more dimensions after merging.
inline constexpr int kMaxPackDims = 5;

// Number of units that a lane loads before the first store, so that it waits for memory only once.
inline constexpr uint32_t kUnitsInFlight = 4;

// Division of numbers below 2^31 by a constant known in advance, as a multiplication and a shift.
// GPUs have no division instruction.
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;
};

struct PackDim {
  int64_t src_stride = 0;  // Stride in bytes.
  int64_t dst_stride = 0;
  Divisor size;  // Size in units.
};

struct PackShape {
  int32_t ndim = 0;
  PackDim dims[kMaxPackDims];  // Innermost first.
};

// Units [first, first + count) of a region. `src` and `dst` locate the region's unit 0: one is a
// tensor address, the other an offset in the staging buffer.
struct PackChunk {
  int64_t src = 0;
  int64_t dst = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  int32_t shape = -1;  // Index into PackTables::shapes; -1 if contiguous on both sides.
  uint32_t width = 1;  // Bytes per unit.
};

struct PackTables {
  const PackShape* shapes;
  const PackChunk* chunks;
  const int32_t* first_chunk;  // Worker w has chunks [first_chunk[w], first_chunk[w + 1]).
};

// Offsets added to `src` and `dst` of chunks: on one side the address of offset 0 of the staging
// buffer, on the other 0. That address may be invalid if only a window of the staging buffer is in
// memory.
struct PackBases {
  uint64_t src = 0;
  uint64_t dst = 0;
};

TORCH_CKPT_LANE uint32_t quotient(uint32_t n, const Divisor& by) {
  const auto high = static_cast<uint32_t>((uint64_t{n} * by.multiplier) >> 32);
  return (high + n) >> by.shift;
}

struct UnitOffsets {
  int64_t src;
  int64_t dst;
};

// Returns the offsets of unit `unit` of a region, relative to its unit 0.
TORCH_CKPT_LANE UnitOffsets unit_offsets(const PackChunk& chunk, const PackShape* shapes,
                                         uint32_t unit) {
  if (chunk.shape < 0) {
    const int64_t offset = int64_t{unit} * chunk.width;
    return {offset, offset};
  }
  const PackShape& shape = shapes[chunk.shape];
  UnitOffsets offsets = {0, 0};
  uint32_t rest = unit;
  for (int32_t d = 0; d < shape.ndim; ++d) {
    const PackDim& dim = shape.dims[d];
    // The outermost dimension gets the whole remainder.
    const uint32_t outer = d + 1 < shape.ndim ? quotient(rest, dim.size) : 0;
    const int64_t index = rest - outer * dim.size.value;
    offsets.src += index * dim.src_stride;
    offsets.dst += index * dim.dst_stride;
    rest = outer;
  }
  return offsets;
}

template <typename Unit>
TORCH_CKPT_LANE void copy_units(const PackChunk& chunk, const PackShape* shapes, PackBases bases,
                                uint32_t lane) {
  const uint64_t src = bases.src + static_cast<uint64_t>(chunk.src);
  const uint64_t dst = bases.dst + static_cast<uint64_t>(chunk.dst);
  for (uint32_t begin = lane; begin < chunk.count; begin += kLanes * kUnitsInFlight) {
    Unit units[kUnitsInFlight] = {};
    uint64_t to[kUnitsInFlight] = {};
    for (uint32_t k = 0; k < kUnitsInFlight; ++k) {
      const uint32_t i = begin + k * kLanes;
      if (i < chunk.count) {
        const UnitOffsets offsets = unit_offsets(chunk, shapes, chunk.first + i);
        units[k] = load_unit<Unit>(src + static_cast<uint64_t>(offsets.src));
        to[k] = dst + static_cast<uint64_t>(offsets.dst);
      }
    }
    for (uint32_t k = 0; k < kUnitsInFlight; ++k) {
      if (begin + k * kLanes < chunk.count) store_unit(to[k], units[k]);
    }
  }
}

// Executes the work of one lane of a worker.
TORCH_CKPT_LANE void pack_lane(const PackTables& tables, PackBases bases, int32_t worker,
                               uint32_t lane) {
  for (int32_t c = tables.first_chunk[worker]; c < tables.first_chunk[worker + 1]; ++c) {
    const PackChunk chunk = tables.chunks[c];
    switch (chunk.width) {
      case 16:
        copy_units<Unit16>(chunk, tables.shapes, bases, lane);
        break;
      case 8:
        copy_units<uint64_t>(chunk, tables.shapes, bases, lane);
        break;
      case 4:
        copy_units<uint32_t>(chunk, tables.shapes, bases, lane);
        break;
      case 2:
        copy_units<uint16_t>(chunk, tables.shapes, bases, lane);
        break;
      default:
        copy_units<uint8_t>(chunk, tables.shapes, bases, lane);
    }
  }
}

}  // namespace torch_ckpt
