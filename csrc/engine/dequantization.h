#pragma once

// Dequantisation of a tensor: its numbers have 8 or 4 bits, and each block of them has a scale in
// another stored tensor. A load into a wider dtype multiplies the numbers by their scales while it
// unpacks them. LoadJob reads the scales of a requested box before its numbers.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/dequantize.h"
#include "base/status.h"
#include "base/strided.h"
#include "device/product_lane.h"
#include "engine/stored_slice.h"
#include "geometry/box.h"
#include "geometry/overlap.h"

namespace torch_ckpt {

// How one tensor is stored: row-major, in one slice of a file. All dimensions count numbers.
struct QuantizedTensor {
  DType dtype = DType::kFloat8E4M3FN;  // kFloat4E2M1FNX2: packed, two numbers to a byte.
  Dims sizes;
  Dims block;                  // Numbers that share a scale, in each dimension.
  bool is_transposed = false;  // Loads see the last two dimensions in the other order.
  StoredSlice scales;          // Row-major, with one scale for each block.
  DType scale_dtype = DType::kFloat32;
  // The dtypes in which a load gets the elements, the usual one first: dequantised ones, and
  // `dtype` for the stored numbers.
  std::vector<DType> targets;

  // Returns the dtype in which a target of the given dtype gets the elements.
  DType given(std::optional<DType> target) const;
  bool is_packed() const { return dtype == DType::kFloat4E2M1FNX2; }
};

// By FQN.
using QuantizedTensors = std::map<std::string, QuantizedTensor>;

// A range of the tensor's bytes, and the box of numbers in it that a request wants.
struct QuantizedPiece {
  ByteRange range;  // From the first byte of the tensor.
  Box box;
};

// The arguments of Device::multiply.
struct DeviceProducts {
  ProductTable table;
  Bytes codes;
  std::span<const float> values;
  std::vector<float> scales;
};

// Dequantises one requested box. `run` is safe to call from any thread after the scales are set.
class Dequantization {
 public:
  // `box` is what the request wants, of the tensor as loads see it. Requires: `tensor` outlives the
  // result. Errors: kMismatch for a box outside the tensor; kCorruption if the sizes of numbers,
  // blocks and scales contradict each other; kUnsupported for other dtypes.
  static Result<Dequantization> make(const QuantizedTensor& tensor, const Box& box, DType to,
                                     const std::string& name);

  const QuantizedTensor& tensor() const { return *tensor_; }

  // The box of the scale tensor that the request needs, in its dimensions, and its sizes.
  const Box& scale_box() const { return scale_box_; }
  Dims scale_sizes() const;
  int64_t scale_nbytes() const;

  // Memory for the scales of `scale_box`, row-major.
  std::vector<std::byte>& scales() { return scales_; }

  // Cuts the request into pieces of at most `max_nbytes`, as split_by_source does.
  std::vector<QuantizedPiece> cut(int64_t max_nbytes, int64_t max_gap) const;

  // Writes the products of a piece to the request's tensor. `from` begins with the piece's first
  // byte. `strides` are those of the tensor, in bytes, as loads see it.
  void run(const Box& piece, const std::byte* from, const Dims& strides, std::byte* tensor) const;

  // The copy of a piece from row-major products to the request's tensor, whose strides are given.
  StridedCopy copy_of(const Box& piece, const Dims& strides) const;

  // The products of a piece for a device that computes them. `strides` are those of the tensor.
  // Returns nullopt if a table cannot describe the piece. `from` begins with the piece's first
  // byte.
  std::optional<DeviceProducts> for_device(const Box& piece, const std::byte* from,
                                           const Dims& strides, std::byte* tensor) const;

  // Writes the products of a piece to `out`, row-major.
  void run_row_major(const Box& piece, const std::byte* from, std::byte* out) const;

 private:
  struct Rows;
  void visit(Rows& rows, size_t dim, const std::byte* from, int64_t scale, std::byte* to) const;
  void run_rows(Rows& rows, const std::byte* from, int64_t scale, std::byte* to) const;
  Dims as_stored(Dims dims) const;

  const QuantizedTensor* tensor_ = nullptr;
  DType to_ = DType::kFloat32;
  size_t added_dims_ = 0;  // Leading dimensions of size 1, so that there are at least two.
  // As stored, with the added dimensions.
  Box box_;
  Dims block_;
  Dims strides_;        // In bytes; of the last dimension 1.
  Dims scale_strides_;  // In scales, of `scales_`.
  Box scale_box_;       // Without the added dimensions.
  std::vector<std::byte> scales_;
};

}  // namespace torch_ckpt
