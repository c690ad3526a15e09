#pragma once

// The kernels, as functions that start them on a stream and return. What they are given lies in
// memory that the GPU can reach, until the stream is done with it.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/pack_lane.h"

namespace torch_ckpt {

// Workers [first_worker, worker_end) of a plan.
cudaError_t launch_pack(const PackTables& tables, PackBases bases, int32_t first_worker,
                        int32_t worker_end, cudaStream_t stream);

}  // namespace torch_ckpt
