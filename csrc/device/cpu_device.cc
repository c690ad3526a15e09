#include <algorithm>
#include <cstring>

#include "base/crc.h"
#include "device/device.h"
#include "device/transpose.h"

namespace torch_ckpt {
namespace {

// Chunk size for checksums: copied bytes are still in the L2 cache.
constexpr int64_t kChecksumChunk = int64_t{128} << 10;

// Copies one row of `count` elements with arbitrary strides.
template <int64_t kItemsize>
void copy_row(const std::byte* src, int64_t src_stride, std::byte* dst, int64_t dst_stride,
              int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * src_stride, kItemsize);
  }
}

void copy_row(int64_t itemsize, const std::byte* src, int64_t src_stride, std::byte* dst,
              int64_t dst_stride, int64_t count) {
  if (src_stride == itemsize && dst_stride == itemsize) {
    std::memcpy(dst, src, static_cast<size_t>(count * itemsize));
    return;
  }
  switch (itemsize) {
    case 1:
      return copy_row<1>(src, src_stride, dst, dst_stride, count);
    case 2:
      return copy_row<2>(src, src_stride, dst, dst_stride, count);
    case 4:
      return copy_row<4>(src, src_stride, dst, dst_stride, count);
    case 8:
      return copy_row<8>(src, src_stride, dst, dst_stride, count);
    case 16:
      return copy_row<16>(src, src_stride, dst, dst_stride, count);
    default:
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(dst + i * dst_stride, src + i * src_stride, static_cast<size_t>(itemsize));
      }
  }
}

void copy_dims(const StridedCopy& copy, size_t dim, const std::byte* src, std::byte* dst) {
  if (dim + 1 >= copy.sizes.size()) {
    const bool scalar = copy.sizes.empty();
    copy_row(copy.itemsize, src, scalar ? copy.itemsize : copy.src_strides[dim], dst,
             scalar ? copy.itemsize : copy.dst_strides[dim], scalar ? 1 : copy.sizes[dim]);
    return;
  }
  for (int64_t i = 0; i < copy.sizes[dim]; ++i) {
    copy_dims(copy, dim + 1, src + i * copy.src_strides[dim], dst + i * copy.dst_strides[dim]);
  }
}

// Returns the dimension of the shortest stride. A stride of 0 only repeats elements.
size_t nearest(const Dims& strides) {
  size_t best = strides.size() - 1;
  for (size_t d = best; d-- > 0;) {
    if (strides[d] != 0 && (strides[d] < strides[best] || strides[best] == 0)) best = d;
  }
  return best;
}

// Moves dimension `dim` of a copy to the end.
void move_to_end(StridedCopy& copy, size_t dim) {
  for (Dims* dims : {&copy.sizes, &copy.src_strides, &copy.dst_strides}) {
    std::rotate(dims->begin() + static_cast<int64_t>(dim),
                dims->begin() + static_cast<int64_t>(dim) + 1, dims->end());
  }
}

// Copies a transposed tensor. The last dimension but one is the nearest of the destination, and the
// last one the nearest of the source.
void copy_transposed(const StridedCopy& copy, size_t dim, const std::byte* src, std::byte* dst) {
  if (dim + 2 == copy.sizes.size()) {
    const Transposition matrix = {.rows = copy.sizes[dim],
                                  .columns = copy.sizes[dim + 1],
                                  .src_row_stride = copy.src_strides[dim],
                                  .src_column_stride = copy.src_strides[dim + 1],
                                  .dst_row_stride = copy.dst_strides[dim],
                                  .dst_column_stride = copy.dst_strides[dim + 1]};
    return transpose(matrix, copy.itemsize, src, dst);
  }
  for (int64_t i = 0; i < copy.sizes[dim]; ++i) {
    copy_transposed(copy, dim + 1, src + i * copy.src_strides[dim],
                    dst + i * copy.dst_strides[dim]);
  }
}

class CpuDevice : public Device {
 public:
  bool is_host() const override { return true; }

  MemorySource& buffers() const override {
    static HeapMemorySource heap;
    return heap;
  }

  Result<std::unique_ptr<DeviceEvent>> unpack(std::span<const TensorCopy> copies,
                                              Bytes buffer) const override {
    for (const TensorCopy& one : copies) {
      copy_on_cpu(one.copy, buffer.data(), one.tensor);
    }
    return std::unique_ptr<DeviceEvent>();
  }

  Result<std::unique_ptr<DeviceEvent>> pack(std::span<const TensorCopy> copies,
                                            MutableBytes buffer) const override {
    for (const TensorCopy& one : copies) {
      copy_on_cpu(one.copy, one.tensor, buffer.data());
    }
    return std::unique_ptr<DeviceEvent>();
  }

  Result<std::shared_ptr<void>> pin(MutableBytes) const override { return std::shared_ptr<void>(); }
};

}  // namespace

const Device& cpu_device() {
  static const CpuDevice device;
  return device;
}

void copy_on_cpu(const StridedCopy& copy, const std::byte* src, std::byte* dst) {
  if (std::find(copy.sizes.begin(), copy.sizes.end(), 0) != copy.sizes.end()) return;
  StridedCopy simple = simplified(copy);
  src += simple.src_offset;
  dst += simple.dst_offset;
  if (simple.sizes.size() < 2 || !can_transpose(simple.itemsize)) {
    return copy_dims(simple, 0, src, dst);
  }
  const size_t near_in_src = nearest(simple.src_strides);
  const size_t near_in_dst = nearest(simple.dst_strides);
  if (near_in_src == near_in_dst) return copy_dims(simple, 0, src, dst);
  move_to_end(simple, near_in_dst);
  move_to_end(simple, near_in_src - (near_in_src > near_in_dst ? 1 : 0));
  copy_transposed(simple, 0, src, dst);
}

uint32_t copy_and_checksum(Bytes src, MutableBytes dst, uint32_t crc) {
  for (int64_t begin = 0; begin < ssize(src); begin += kChecksumChunk) {
    const int64_t nbytes = std::min(kChecksumChunk, ssize(src) - begin);
    const MutableBytes out = slice(dst, begin, nbytes);
    std::memcpy(out.data(), src.data() + begin, out.size());
    crc = crc32(crc, out);
  }
  return crc;
}

}  // namespace torch_ckpt
