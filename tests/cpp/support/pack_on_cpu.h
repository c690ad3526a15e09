#pragma once

// Does on the CPU what kernels do, lane by lane: it tests their arithmetic where there is no GPU.

#include <cstdint>
#include <cstring>
#include <span>

#include "device/pack_lane.h"
#include "device/pack_plan.h"
#include "device/product_lane.h"

namespace torch_ckpt {

// One window, which is in `memory`.
inline void run_window_on_cpu(const PackPlan& plan, const PackWindow& window, std::byte* memory) {
  for (int32_t worker = window.first_worker; worker < window.worker_end; ++worker) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      pack_lane(plan.tables(), plan.bases(window, memory), worker, lane);
    }
  }
}

// A whole plan. Requires: `staging` is aligned to kStagingAlignment.
inline void execute_on_cpu(const PackPlan& plan, std::byte* staging) {
  for (const PackWindow& window : plan.windows) {
    run_window_on_cpu(plan, window, staging + window.base());
  }
  for (const DirectCopy& copy : plan.direct) {
    std::byte* place = staging + copy.staging_offset;
    const bool packs = plan.direction == PackDirection::kPack;
    std::memcpy(packs ? place : copy.tensor, packs ? copy.tensor : place,
                static_cast<size_t>(copy.nbytes));
  }
}

// All products of a table, which has the address of the tensor.
inline void multiply_on_cpu(ProductTable table, Bytes codes, std::span<const float> values,
                            std::span<const float> scales) {
  table.codes = reinterpret_cast<uint64_t>(codes.data());
  table.values = reinterpret_cast<uint64_t>(values.data());
  table.scales = reinterpret_cast<uint64_t>(scales.data());
  for (uint32_t i = 0; i < table.count; ++i) multiply_number(table, i);
}

}  // namespace torch_ckpt
