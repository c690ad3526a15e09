#pragma once

// Functions that launch kernels on a stream and return. Their arguments point to memory that the
// GPU can access, and that stays valid until the stream has finished the kernel.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/pack_lane.h"
#include "device/product_lane.h"

namespace torch_ckpt {

// Runs workers [first_worker, worker_end) of a plan.
cudaError_t launch_pack(const PackTables& tables, PackBases bases, int32_t first_worker,
                        int32_t worker_end, cudaStream_t stream);

// Computes all products of a table, whose addresses are those of the GPU.
cudaError_t launch_products(const ProductTable& table, cudaStream_t stream);

}  // namespace torch_ckpt
