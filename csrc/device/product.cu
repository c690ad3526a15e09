// Executes a ProductTable on a GPU.

#include "device/kernels.h"

namespace torch_ckpt {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kMostBlocks = 4096;  // Enough to fill a GPU; each thread then has many numbers.

__global__ void product_kernel(ProductTable table) {
  const uint32_t stride = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < table.count; i += stride) {
    multiply_number(table, i);
  }
}

}  // namespace

cudaError_t launch_products(const ProductTable& table, cudaStream_t stream) {
  if (table.count == 0) return cudaSuccess;
  const uint32_t all = (table.count + kThreads - 1) / kThreads;
  const uint32_t blocks = all < kMostBlocks ? all : kMostBlocks;
  product_kernel<<<blocks, kThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

}  // namespace torch_ckpt
