#include <algorithm>
#include <cstring>

#include "base/crc.h"
#include "device/device.h"

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

// A transposed copy has long strides on one side and misses the cache at every element. Tiles of
// the two innermost dimensions fit both sides into the cache.
constexpr int64_t kTile = 32;

bool is_transposed(const StridedCopy& copy) {
  const size_t n = copy.sizes.size();
  if (n < 2) return false;
  const auto steps_shorter_outside = [n](const Dims& strides) {
    return strides[n - 2] < strides[n - 1];
  };
  return steps_shorter_outside(copy.src_strides) != steps_shorter_outside(copy.dst_strides) &&
         copy.sizes[n - 1] > 1 && copy.sizes[n - 2] > 1;
}

void copy_tiled(const StridedCopy& copy, size_t dim, const std::byte* src, std::byte* dst) {
  if (dim + 2 < copy.sizes.size()) {
    for (int64_t i = 0; i < copy.sizes[dim]; ++i) {
      copy_tiled(copy, dim + 1, src + i * copy.src_strides[dim], dst + i * copy.dst_strides[dim]);
    }
    return;
  }
  const int64_t rows = copy.sizes[dim];
  const int64_t columns = copy.sizes[dim + 1];
  for (int64_t row = 0; row < rows; row += kTile) {
    for (int64_t column = 0; column < columns; column += kTile) {
      const int64_t row_end = std::min(rows, row + kTile);
      for (int64_t r = row; r < row_end; ++r) {
        copy_row(copy.itemsize,
                 src + r * copy.src_strides[dim] + column * copy.src_strides[dim + 1],
                 copy.src_strides[dim + 1],
                 dst + r * copy.dst_strides[dim] + column * copy.dst_strides[dim + 1],
                 copy.dst_strides[dim + 1], std::min(columns - column, kTile));
      }
    }
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
  const StridedCopy simple = simplified(copy);
  src += simple.src_offset;
  dst += simple.dst_offset;
  if (is_transposed(simple)) {
    copy_tiled(simple, 0, src, dst);
  } else {
    copy_dims(simple, 0, src, dst);
  }
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
