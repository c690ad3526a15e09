#include "engine/publish/merge.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/parallel_for.h"
#include "base/xxh3.h"
#include "codec/block.h"
#include "codec/encoded_block.h"
#include "codec/xor.h"
#include "codec/zstd.h"
#include "geometry/flat_range.h"

namespace torch_ckpt {
namespace {

// Blocks that one thread merges at a time.
constexpr int64_t kMergedBlocks = 16;

// What a thread applies at a time.
constexpr int64_t kApplyNbytes = int64_t{1} << 20;

Dims row_major_strides(const Dims& sizes, int64_t itemsize) {
  Dims strides = contiguous_strides(sizes);
  for (int64_t& stride : strides) stride *= itemsize;
  return strides;
}

// Returns the length of a box, or nullopt if it has none, or an end, that fits an int64_t.
std::optional<int64_t> nbytes_of(const Box& box, int64_t itemsize) {
  if (box.offsets.size() != box.sizes.size()) return std::nullopt;
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    if (box.offsets[d] < 0 || !checked_add(box.offsets[d], box.sizes[d])) return std::nullopt;
  }
  const auto numel = checked_numel(box.sizes);
  return numel ? checked_mul(*numel, itemsize) : std::nullopt;
}

int64_t offset_of(const Dims& index, const Dims& origin, const Dims& strides) {
  int64_t offset = 0;
  for (size_t d = 0; d < index.size(); ++d) offset += (index[d] - origin[d]) * strides[d];
  return offset;
}

std::optional<Box> intersection(const Box& a, const Box& b) {
  Box out;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    out.offsets.push_back(begin);
    out.sizes.push_back(end - begin);
  }
  return out;
}

void xor_dims(const StridedCopy& copy, size_t dim, const std::byte* src, std::byte* dst) {
  if (dim == copy.sizes.size()) return xor_bytes(src, dst, copy.itemsize);
  const bool is_row = dim + 1 == copy.sizes.size() && copy.src_strides[dim] == copy.itemsize &&
                      copy.dst_strides[dim] == copy.itemsize;
  if (is_row) return xor_bytes(src, dst, copy.sizes[dim] * copy.itemsize);
  for (int64_t i = 0; i < copy.sizes[dim]; ++i) {
    xor_dims(copy, dim + 1, src + i * copy.src_strides[dim], dst + i * copy.dst_strides[dim]);
  }
}

// Computes dst ^= src for each element.
void xor_strided(const StridedCopy& copy, const std::byte* src, std::byte* dst) {
  const StridedCopy simple = simplified(copy);
  xor_dims(simple, 0, src + simple.src_offset, dst + simple.dst_offset);
}

// A copy with source and destination exchanged.
StridedCopy reversed(StridedCopy copy) {
  std::swap(copy.src_offset, copy.dst_offset);
  std::swap(copy.src_strides, copy.dst_strides);
  return copy;
}

// The elements of a block that are in the box of a mask.
struct Piece {
  StridedCopy to_mask;    // From the block.
  StridedCopy to_target;  // From the block; empty without a target.
};

struct Scratch {
  std::vector<std::byte> xors = std::vector<std::byte>(kBlockNbytes);
  std::vector<std::byte> values = std::vector<std::byte>(kBlockNbytes);
};

class Merge {
 public:
  Merge(MutableBytes mask, const LiveTensor* target, const Box& box, const StoredBlocks& blocks)
      : mask_(mask),
        target_(target),
        box_(box),
        blocks_(blocks),
        stored_nbytes_(nbytes_of(blocks.box, blocks.itemsize).value_or(-1)) {
    if (nbytes_of(box, blocks.itemsize).value_or(0) > 0) {
      mask_strides_ = row_major_strides(box.sizes, blocks.itemsize);
    }
  }

  Status check() const {
    if (stored_nbytes_ < 0) return corruption("a stored box is invalid");
    const auto mask_nbytes = nbytes_of(box_, blocks_.itemsize);
    if (box_.sizes.size() != blocks_.box.sizes.size() || !mask_nbytes ||
        (!mask_.empty() && *mask_nbytes != ssize(mask_))) {
      return invalid_argument("a mask of ", ssize(mask_), " bytes does not have the elements of ",
                              to_string(box_), ", of ", blocks_.itemsize, " bytes each");
    }
    if (target_ != nullptr &&
        (target_->sizes != box_.sizes || itemsize(target_->dtype) != blocks_.itemsize)) {
      return invalid_argument("the target is ", dtype_info(target_->dtype).name, " ",
                              to_string(target_->sizes), ", expected ", to_string(box_), " of ",
                              blocks_.itemsize, " bytes per element");
    }
    const int64_t count = row_count();
    if (ssize(blocks_.table) != count * kBlockRowNbytes ||
        !range_within(blocks_.first_block, count, block_count(stored_nbytes_))) {
      return corruption("a table of ", ssize(blocks_.table), " bytes does not describe blocks of ",
                        to_string(blocks_.box), " from block ", blocks_.first_block);
    }
    int64_t payload = 0;
    for (int64_t i = 0; i < count; ++i) payload += row(i).nbytes;
    if (payload != ssize(blocks_.payload)) {
      return corruption("the blocks of ", to_string(blocks_.box), " have ", ssize(blocks_.payload),
                        " bytes, and their table states ", payload);
    }
    return ok_status();
  }

  int64_t row_count() const { return ssize(blocks_.table) / kBlockRowNbytes; }

  BlockRow row(int64_t i) const {
    return load_block_row(blocks_.table.data() + i * kBlockRowNbytes);
  }

  // Merges the block of row `i`, whose encoded bytes are `encoded`.
  Status merge(int64_t i, Bytes encoded, Scratch& scratch) const {
    const BlockRow row = this->row(i);
    const int64_t block = blocks_.first_block + i;
    const int64_t nbytes = block_nbytes(stored_nbytes_, block);
    if (encoded.empty() && target_ == nullptr) return ok_status();
    if (!encoded.empty() && static_cast<uint32_t>(xxh3(encoded)) != row.check) {
      return damaged(block, "the sum of its encoded bytes differs");
    }
    if (encoded.empty() && row.base != row.result) {
      return damaged(block, "it has other digests and no bytes");
    }
    int64_t covered = 0;
    const std::vector<Piece> pieces = pieces_of(block, nbytes, &covered);
    if (pieces.empty()) return ok_status();
    const bool is_checked = target_ != nullptr && covered == nbytes;
    const MutableBytes values = slice(MutableBytes(scratch.values), 0, nbytes);
    if (is_checked) {
      for (const Piece& piece : pieces) {
        copy_on_cpu(reversed(piece.to_target), target_->data, values.data());
        if (!mask_.empty()) xor_strided(reversed(piece.to_mask), mask_.data(), values.data());
      }
      if (xxh3(values) != row.base) {
        return mismatch("block ", block, " of ", to_string(blocks_.box),
                        ": the values are not those of the version before");
      }
    }
    if (encoded.empty()) return ok_status();
    const MutableBytes xors = slice(MutableBytes(scratch.xors), 0, nbytes);
    if (const Status status = decode_block(encoded, unit_of(blocks_.itemsize), xors);
        !status.ok()) {
      return status.code() == StatusCode::kCorruption ? damaged(block, status.message()) : status;
    }
    if (is_checked) {
      xor_bytes(xors.data(), values.data(), nbytes);
      if (xxh3(values) != row.result) return damaged(block, "its values have another digest");
    }
    if (mask_.empty()) return ok_status();
    for (const Piece& piece : pieces) xor_strided(piece.to_mask, xors.data(), mask_.data());
    return ok_status();
  }

 private:
  Status damaged(int64_t block, std::string_view why) const {
    return corruption("block ", block, " of ", to_string(blocks_.box), " is damaged: ", why);
  }

  // Returns the parts of a block that are in the box, and their length.
  std::vector<Piece> pieces_of(int64_t block, int64_t nbytes, int64_t* covered) const {
    const int64_t size = blocks_.itemsize;
    const int64_t begin = block * kBlockNbytes / size;
    std::vector<Piece> pieces;
    int64_t block_offset = 0;
    for (Box part : flat_range_to_boxes(blocks_.box.sizes, begin, begin + nbytes / size)) {
      const Dims part_strides = row_major_strides(part.sizes, size);
      for (size_t d = 0; d < part.offsets.size(); ++d) part.offsets[d] += blocks_.box.offsets[d];
      if (const auto common = intersection(part, box_)) {
        Piece& piece = pieces.emplace_back();
        piece.to_mask = {
            .itemsize = size,
            .sizes = common->sizes,
            .src_offset = block_offset + offset_of(common->offsets, part.offsets, part_strides),
            .src_strides = part_strides,
            .dst_offset = offset_of(common->offsets, box_.offsets, mask_strides_),
            .dst_strides = mask_strides_};
        if (target_ != nullptr) {
          piece.to_target = piece.to_mask;
          piece.to_target.dst_offset = offset_of(common->offsets, box_.offsets, target_->strides);
          piece.to_target.dst_strides = target_->strides;
        }
        *covered += *checked_numel(common->sizes) * size;
      }
      block_offset += *checked_numel(part.sizes) * size;
    }
    return pieces;
  }

  const MutableBytes mask_;
  const LiveTensor* const target_;
  const Box& box_;
  const StoredBlocks& blocks_;
  const int64_t stored_nbytes_;
  Dims mask_strides_;  // Empty if the box is.
};

}  // namespace

Status merge_blocks(MutableBytes mask, const LiveTensor* target, const Box& box,
                    const StoredBlocks& blocks, int threads) {
  RETURN_IF_ERROR(zstd_available());
  const Merge merge(mask, target, box, blocks);
  RETURN_IF_ERROR(merge.check());
  const int64_t count = merge.row_count();
  const int64_t runs = (count + kMergedBlocks - 1) / kMergedBlocks;
  std::vector<int64_t> begins(static_cast<size_t>(count) + 1);
  for (int64_t i = 0; i < count; ++i) {
    begins[static_cast<size_t>(i) + 1] = begins[static_cast<size_t>(i)] + merge.row(i).nbytes;
  }
  std::vector<Status> statuses(static_cast<size_t>(runs));
  parallel_for(runs, threads, [&](int64_t run) {
    Scratch scratch;
    Status& status = statuses[static_cast<size_t>(run)];
    const int64_t end = std::min((run + 1) * kMergedBlocks, count);
    for (int64_t i = run * kMergedBlocks; i < end && status.ok(); ++i) {
      const int64_t begin = begins[static_cast<size_t>(i)];
      const int64_t nbytes = begins[static_cast<size_t>(i) + 1] - begin;
      status = merge.merge(i, slice(blocks.payload, begin, nbytes), scratch);
    }
  });
  for (const Status& status : statuses) RETURN_IF_ERROR(status);
  return ok_status();
}

Status apply_mask(const LiveTensor& target, Bytes mask, int threads) {
  const int64_t size = itemsize(target.dtype);
  const int64_t numel = checked_numel(target.sizes).value_or(0);
  if (numel * size != ssize(mask)) {
    return invalid_argument("a mask of ", ssize(mask), " bytes does not have the ", numel * size,
                            " bytes of the target");
  }
  const int64_t most = kApplyNbytes / size;
  parallel_for((numel + most - 1) / most, threads, [&](int64_t i) {
    const int64_t begin = i * most;
    const int64_t end = std::min(begin + most, numel);
    const std::byte* from = mask.data() + begin * size;
    if (is_contiguous(target)) {
      return xor_bytes(from, target.data + begin * size, (end - begin) * size);
    }
    for (const Box& box : flat_range_to_boxes(target.sizes, begin, end)) {
      const StridedCopy copy = {
          .itemsize = size,
          .sizes = box.sizes,
          .src_strides = row_major_strides(box.sizes, size),
          .dst_offset = offset_of(box.offsets, Dims(box.offsets.size()), target.strides),
          .dst_strides = target.strides};
      xor_strided(copy, from, target.data);
      from += *checked_numel(box.sizes) * size;
    }
  });
  return ok_status();
}

}  // namespace torch_ckpt
