// Executes a PackPlan on a GPU: packs tensors into a buffer or unpacks them from one.

#include "device/kernels.h"

namespace torch_ckpt {
namespace {

constexpr int32_t kWarpsPerBlock = 4;

__global__ void pack_kernel(PackTables tables, PackBases bases, int32_t first_worker,
                            int32_t worker_end) {
  const auto warp = static_cast<int32_t>(threadIdx.x / kLanes);
  const int32_t worker = first_worker + static_cast<int32_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (worker < worker_end) pack_lane(tables, bases, worker, threadIdx.x % kLanes);
}

}  // namespace

cudaError_t launch_pack(const PackTables& tables, PackBases bases, int32_t first_worker,
                        int32_t worker_end, cudaStream_t stream) {
  const int32_t workers = worker_end - first_worker;
  if (workers == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((workers + kWarpsPerBlock - 1) / kWarpsPerBlock);
  pack_kernel<<<blocks, kWarpsPerBlock * kLanes, 0, stream>>>(tables, bases, first_worker,
                                                              worker_end);
  return cudaGetLastError();
}

}  // namespace torch_ckpt
