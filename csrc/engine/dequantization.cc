#include "engine/dequantization.h"

#include <algorithm>
#include <utility>

#include "device/device.h"
#include "device/pack_plan.h"

namespace torch_ckpt {
namespace {

// Products that are not neighbors in the tensor are copied from a buffer of about this length.
constexpr int64_t kScratchNbytes = int64_t{256} << 10;

// Bound of the products of one table: a divisor needs numbers below 2^31.
constexpr int64_t kMostProducts = int64_t{1} << 30;

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace

// What `run` needs for all rows of a piece. The strides are of the destination, as stored.
struct Dequantization::Rows {
  const Box& piece;
  Dims strides;
  std::vector<std::byte> codes = {};
  std::vector<float> scales = {};
  std::vector<std::byte> products = {};
};

DType QuantizedTensor::given(std::optional<DType> target) const {
  const auto found = target ? std::ranges::find(targets, *target) : targets.end();
  return found == targets.end() ? targets.front() : *found;
}

Result<Dequantization> Dequantization::make(const QuantizedTensor& tensor, const Box& box, DType to,
                                            const std::string& name) {
  if (!(is_code(tensor.dtype) || tensor.is_packed()) || !is_scale(tensor.scale_dtype) ||
      !is_dequantized(to)) {
    return unsupported("cannot dequantise '", name, "': from ", dtype_info(tensor.dtype).name,
                       " with scales of ", dtype_info(tensor.scale_dtype).name, " to ",
                       dtype_info(to).name);
  }
  Dequantization out;
  out.tensor_ = &tensor;
  out.to_ = to;
  const size_t ndim = tensor.sizes.size();
  const bool has_blocks = ndim == tensor.block.size() &&
                          std::ranges::all_of(tensor.block, [](int64_t n) { return n > 0; });
  const bool is_whole = !tensor.is_packed() || (ndim > 0 && tensor.sizes.back() % 2 == 0);
  if (!has_blocks || !is_whole || (tensor.is_transposed && ndim < 2)) {
    return corruption("cannot dequantise '", name, "': sizes ", to_string(tensor.sizes),
                      " do not have blocks ", to_string(tensor.block));
  }
  const bool has_numbers = checked_numel(tensor.sizes) != 0;
  const auto scale_numel = checked_numel(out.scale_sizes());
  if (!scale_numel ||
      (has_numbers && *scale_numel * itemsize(tensor.scale_dtype) != tensor.scales.nbytes)) {
    return corruption("cannot dequantise '", name, "': blocks ", to_string(tensor.block),
                      " of sizes ", to_string(tensor.sizes), " do not have ", tensor.scales.nbytes,
                      " bytes of scales in '", tensor.scales.name, "'");
  }
  out.box_ = {out.as_stored(box.offsets), out.as_stored(box.sizes)};
  if (box.offsets.size() != ndim || !lies_within(out.box_, tensor.sizes)) {
    return mismatch("cannot read ", to_string(box), " of '", name,
                    "': the stored tensor has sizes ", to_string(tensor.sizes));
  }
  out.block_ = tensor.block;
  Dims bytes = tensor.sizes;
  if (tensor.is_packed()) bytes.back() /= 2;
  out.strides_ = contiguous_strides(bytes);
  const bool is_empty = checked_numel(box.sizes) == 0;
  for (size_t d = 0; d < ndim; ++d) {
    const int64_t begin = out.box_.offsets[d] / out.block_[d];
    const int64_t end = ceil_div(out.box_.offsets[d] + out.box_.sizes[d], out.block_[d]);
    out.scale_box_.offsets.push_back(is_empty ? 0 : begin);
    out.scale_box_.sizes.push_back(is_empty ? 0 : end - begin);
  }
  out.scale_strides_ = contiguous_strides(out.scale_box_.sizes);
  for (; out.block_.size() < 2; ++out.added_dims_) {
    for (Dims* dims : {&out.box_.sizes, &out.block_}) dims->insert(dims->begin(), 1);
    out.box_.offsets.insert(out.box_.offsets.begin(), 0);
    for (Dims* dims : {&out.strides_, &out.scale_strides_}) dims->insert(dims->begin(), 1);
  }
  return out;
}

Dims Dequantization::as_stored(Dims dims) const {
  if (tensor_->is_transposed && dims.size() >= 2) std::swap(*dims.rbegin(), *(dims.rbegin() + 1));
  return dims;
}

Dims Dequantization::scale_sizes() const {
  Dims out = tensor_->sizes;
  for (size_t d = 0; d < out.size(); ++d) out[d] = ceil_div(out[d], tensor_->block[d]);
  return out;
}

int64_t Dequantization::scale_nbytes() const {
  return checked_numel(scale_box_.sizes).value_or(0) * itemsize(tensor_->scale_dtype);
}

std::vector<QuantizedPiece> Dequantization::cut(int64_t max_nbytes, int64_t max_gap) const {
  const int64_t per_byte = tensor_->is_packed() ? 2 : 1;
  const size_t last = box_.sizes.size() - 1;
  std::vector<QuantizedPiece> out;
  if (checked_numel(box_.sizes) == 0) return out;
  StridedCopy
      copy;  // Copies bytes. With these strides of the destination, no dimensions are merged.
  copy.sizes = box_.sizes;
  const int64_t first = box_.offsets[last] / per_byte;
  copy.sizes[last] = ceil_div(box_.offsets[last] + box_.sizes[last], per_byte) - first;
  std::vector<size_t> dims;  // Those that the split does not drop.
  for (size_t d = 0; d <= last; ++d) {
    copy.src_offset += (d == last ? first : box_.offsets[d]) * strides_[d];
    if (copy.sizes[d] != 1) dims.push_back(d);
  }
  copy.src_strides = strides_;
  copy.dst_strides.assign(copy.sizes.size(), 1);
  for (const StridedCopy& piece : split_by_source(copy, max_nbytes, max_gap)) {
    Box box = {box_.offsets, Dims(box_.sizes.size(), 1)};
    for (size_t k = 0; k < dims.size(); ++k) box.sizes[dims[k]] = piece.sizes[k];
    int64_t rest = piece.src_offset;
    for (size_t d = added_dims_; d <= last; ++d) {
      box.offsets[d] = rest / strides_[d];
      rest %= strides_[d];
    }
    const int64_t begin = std::max(box.offsets[last] * per_byte, box_.offsets[last]);
    const int64_t end = std::min((box.offsets[last] + box.sizes[last]) * per_byte,
                                 box_.offsets[last] + box_.sizes[last]);
    box.offsets[last] = begin;
    box.sizes[last] = end - begin;
    out.push_back({source_range(piece), std::move(box)});
  }
  return out;
}

void Dequantization::run(const Box& piece, const std::byte* from, const Dims& strides,
                         std::byte* tensor) const {
  Rows rows = {.piece = piece, .strides = as_stored(strides)};
  rows.strides.insert(rows.strides.begin(), added_dims_, 0);
  for (size_t d = 0; d < rows.strides.size(); ++d) {
    tensor += (piece.offsets[d] - box_.offsets[d]) * rows.strides[d];
  }
  visit(rows, 0, from, 0, tensor);
}

void Dequantization::run_row_major(const Box& piece, const std::byte* from, std::byte* out) const {
  Rows rows = {.piece = piece, .strides = contiguous_strides(piece.sizes)};
  for (int64_t& stride : rows.strides) stride *= itemsize(to_);
  visit(rows, 0, from, 0, out);
}

StridedCopy Dequantization::copy_of(const Box& piece, const Dims& strides) const {
  StridedCopy copy;
  copy.itemsize = itemsize(to_);
  copy.sizes = piece.sizes;
  copy.src_strides = contiguous_strides(piece.sizes);
  for (int64_t& stride : copy.src_strides) stride *= copy.itemsize;
  copy.dst_strides = as_stored(strides);
  copy.dst_strides.insert(copy.dst_strides.begin(), added_dims_, 0);
  for (size_t d = 0; d < piece.sizes.size(); ++d) {
    copy.dst_offset += (piece.offsets[d] - box_.offsets[d]) * copy.dst_strides[d];
  }
  return copy;
}

std::optional<DeviceProducts> Dequantization::for_device(const Box& piece, const std::byte* from,
                                                         const Dims& strides,
                                                         std::byte* tensor) const {
  const StridedCopy copy = copy_of(piece, strides);
  const int64_t count = checked_numel(piece.sizes).value_or(kMostProducts + 1);
  if (count == 0 || count > kMostProducts) return std::nullopt;
  DeviceProducts out;
  out.values = code_values(tensor_->dtype);
  ProductTable& table = out.table;
  table.count = static_cast<uint32_t>(count);
  table.is_packed = tensor_->is_packed();
  table.products = reinterpret_cast<uint64_t>(tensor + copy.dst_offset);
  if (to_ != DType::kFloat32) {
    table.to = to_ == DType::kBFloat16 ? ProductType::kBFloat16 : ProductType::kFloat16;
  }
  const int64_t per_byte = table.is_packed ? 2 : 1;
  const size_t last = piece.sizes.size() - 1;
  table.first_code = static_cast<uint32_t>(piece.offsets[last] % per_byte);
  int64_t last_code = table.first_code;
  Box scales;  // Those of the piece, of `scales_`.
  for (size_t d = 0; d <= last; ++d) {
    const int64_t block = piece.offsets[d] / block_[d];
    scales.offsets.push_back(block - box_.offsets[d] / block_[d]);
    scales.sizes.push_back(ceil_div(piece.offsets[d] + piece.sizes[d], block_[d]) - block);
  }
  const Dims scale_strides = contiguous_strides(scales.sizes);
  for (size_t d = last + 1; d-- > 0;) {
    const int64_t stride = d == last ? 1 : strides_[d] * per_byte;
    last_code += (piece.sizes[d] - 1) * stride;
    if (piece.sizes[d] == 1) continue;
    const bool is_one = scales.sizes[d] == 1;
    if (table.ndim == kMaxProductDims || (!is_one && block_[d] > kMostProducts)) {
      return std::nullopt;
    }
    table.dims[table.ndim++] = {
        .size = divisor(piece.sizes[d]),
        .block = divisor(is_one ? piece.sizes[d] : block_[d]),
        .first = static_cast<uint32_t>(is_one ? 0 : piece.offsets[d] % block_[d]),
        .scale = static_cast<uint32_t>(scale_strides[d]),
        .code = stride,
        .product = copy.dst_strides[d]};
  }
  out.codes = Bytes(from, static_cast<size_t>(last_code / per_byte + 1));
  const int64_t size = itemsize(tensor_->scale_dtype);
  std::vector<std::byte> raw(static_cast<size_t>(*checked_numel(scales.sizes) * size));
  Dims from_strides = scale_strides_;
  Dims to_strides = scale_strides;
  for (Dims* dims : {&from_strides, &to_strides}) {
    for (int64_t& stride : *dims) stride *= size;
  }
  copy_on_cpu(copy_of_box(scales, size, 0, from_strides, to_strides), scales_.data(), raw.data());
  out.scales.resize(raw.size() / static_cast<size_t>(size));
  read_scales(tensor_->scale_dtype, raw.data(), std::ssize(out.scales), out.scales.data());
  return out;
}

// Visits the rows of all dimensions but the last two. `scale` is the position of a scale.
void Dequantization::visit(Rows& rows, size_t dim, const std::byte* from, int64_t scale,
                           std::byte* to) const {
  if (dim + 2 == rows.strides.size()) return run_rows(rows, from, scale, to);
  const int64_t begin = rows.piece.offsets[dim];
  for (int64_t i = 0; i < rows.piece.sizes[dim]; ++i) {
    const int64_t block = (begin + i) / block_[dim] - box_.offsets[dim] / block_[dim];
    visit(rows, dim + 1, from + i * strides_[dim], scale + block * scale_strides_[dim],
          to + i * rows.strides[dim]);
  }
}

void Dequantization::run_rows(Rows& rows, const std::byte* from, int64_t scale,
                              std::byte* to) const {
  const size_t row_dim = rows.strides.size() - 2;
  const size_t dim = row_dim + 1;
  const int64_t count = rows.piece.sizes[dim];
  const int64_t height = rows.piece.sizes[row_dim];
  const int64_t size = itemsize(to_);
  const int64_t begin = rows.piece.offsets[dim];
  const int64_t block = begin / block_[dim];
  const int64_t first_block = block - box_.offsets[dim] / block_[dim];
  const int64_t blocks = ceil_div(begin + count, block_[dim]) - block;
  const bool is_packed = tensor_->is_packed();
  const int64_t scale_size = itemsize(tensor_->scale_dtype);
  if (is_packed) rows.codes.resize(static_cast<size_t>(count));
  rows.scales.resize(static_cast<size_t>(blocks));
  const bool is_direct = rows.strides[dim] == size || count == 1;
  const int64_t together =
      is_direct ? 1 : std::clamp<int64_t>(kScratchNbytes / (count * size), 1, height);
  if (!is_direct) rows.products.resize(static_cast<size_t>(together * count * size));

  for (int64_t done = 0, known = -1; done < height; done += together) {
    const int64_t end = std::min(done + together, height);
    for (int64_t i = done; i < end; ++i) {
      const int64_t row_block = (rows.piece.offsets[row_dim] + i) / block_[row_dim] -
                                box_.offsets[row_dim] / block_[row_dim];
      if (row_block != known) {
        const int64_t at = scale + row_block * scale_strides_[row_dim] + first_block;
        read_scales(tensor_->scale_dtype, scales_.data() + at * scale_size, blocks,
                    rows.scales.data());
        known = row_block;
      }
      const std::byte* codes = from + i * strides_[row_dim];
      if (is_packed) {
        expand_e2m1(codes, begin % 2, count, rows.codes.data());
        codes = rows.codes.data();
      }
      std::byte* out = is_direct ? to + i * rows.strides[row_dim]
                                 : rows.products.data() + (i - done) * count * size;
      dequantize_row({codes, count, begin - block * block_[dim], block_[dim], rows.scales.data()},
                     is_packed ? DType::kFloat8E5M2 : tensor_->dtype, to_, out);
    }
    if (is_direct) continue;
    copy_on_cpu({.itemsize = size,
                 .sizes = {end - done, count},
                 .src_strides = {count * size, size},
                 .dst_strides = {rows.strides[row_dim], rows.strides[dim]}},
                rows.products.data(), to + done * rows.strides[row_dim]);
  }
}

}  // namespace torch_ckpt
