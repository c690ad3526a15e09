#pragma once

// Functions that launch kernels on a stream and return. Their arguments point to memory that the
// GPU can access, and that stays valid until the stream has finished the kernel.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/pack_lane.h"

namespace torch_ckpt {

// Runs workers [first_worker, worker_end) of a plan.
cudaError_t launch_pack(const PackTables& tables, PackBases bases, int32_t first_worker,
                        int32_t worker_end, cudaStream_t stream);

}  // namespace torch_ckpt
