#pragma once

// The frame around a stored tensor: a zip archive as `torch.save` writes it, so that stock DCP,
// `torch.load` and Python's `zipfile` can read the slice. FORMAT.md states every byte.
//
// A slice is head | payload | tail. The head has the pickle that describes the tensor, and ends
// where the payload begins. The tail has the payload's CRC and the zip directory. `TensorFrame`
// writes frames of contiguous tensors; their lengths depend only on dtype and sizes. `parse_frame`
// parses frames that torch.save or TensorFrame wrote.

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/status.h"

namespace torch_ckpt {

// The zip extra field `FB` pads the head to a multiple of kFrameAlignment, so the payload of an
// aligned slice is aligned. For the coarser alignment of large payloads, `plan/layout` leaves a gap
// before the slice. The bytes of a frame never depend on the position of its slice.
inline constexpr int64_t kFrameAlignment = 64;

class TensorFrame {
 public:
  // Returns the frame of a contiguous tensor.
  // Errors: kInvalidArgument for a negative size, more than 64 sizes, or sizes whose product
  // overflows (a size of 0 counts as 1, as in strides).
  static Result<TensorFrame> make(DType dtype, std::span<const int64_t> sizes);

  int64_t head_nbytes() const { return head_nbytes_; }
  int64_t payload_nbytes() const { return payload_nbytes_; }
  int64_t tail_nbytes() const { return tail_nbytes_; }
  int64_t nbytes() const { return head_nbytes_ + payload_nbytes_ + tail_nbytes_; }

  // Requires: out.size() == head_nbytes().
  void write_head(MutableBytes out) const;

  // `crc` is the CRC-32 of the payload. Requires: out.size() == tail_nbytes().
  void write_tail(uint32_t crc, MutableBytes out) const;

 private:
  TensorFrame() = default;

  DType dtype_ = DType::kUInt8;
  std::vector<int64_t> sizes_;
  int64_t pickle_nbytes_ = 0;
  uint32_t pickle_crc_ = 0;
  int64_t head_nbytes_ = 0;
  int64_t payload_nbytes_ = 0;
  int64_t tail_nbytes_ = 0;
};

// A tensor as its slice stores it. Each element has the position
// storage_offset + sum(index[d] * strides[d]) in the payload; `parse_frame` checks that all
// positions are inside the payload. A tensor without elements has storage_offset 0 and contiguous
// strides, even if its slice states others.
struct StoredTensor {
  DType dtype = DType::kUInt8;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // In elements.
  int64_t storage_offset = 0;    // In elements.
  int64_t payload_offset = 0;    // In bytes, from the start of the slice.
  int64_t payload_nbytes = 0;
  uint32_t payload_crc = 0;  // 0 if checksums of torch.save were disabled.
};

// Checks that every element lies inside the payload. Sets storage_offset and strides of a tensor
// without elements to those of a contiguous tensor. Requires: `sizes` and `strides` have the same
// length and no negative value. Errors: kCorruption.
Status check_elements(StoredTensor& tensor);

// Returns the length of the head that `parse_frame` needs for a slice of `nbytes` bytes. `tail` is
// the end of the slice: at least kFrameTailNbytes bytes, or the whole slice.
// Errors: as parse_frame.
inline constexpr int64_t kFrameTailNbytes = 4096;
Result<int64_t> frame_head_nbytes(Bytes tail, int64_t nbytes);

// Parses a frame from the first and the last bytes of its slice, which may overlap.
// Errors: kCorruption for bytes that torch.save cannot have written; kUnsupported for a valid
// archive that is not one plain strided tensor, which torch must read, or for a head shorter than
// frame_head_nbytes; kInvalidArgument for a tail that is too short.
Result<StoredTensor> parse_frame(Bytes head, Bytes tail, int64_t nbytes);

// Verifies a whole zip archive: the CRC-32 of every record, and the agreement of its headers with
// its directory. Returns OK for a compressed archive, and for bytes that neither begin nor end with
// a zip signature. Unless `strict`, returns OK for an archive that torch.save cannot have written.
// Errors: kCorruption.
Status verify_archive(Bytes archive, bool strict);

}  // namespace torch_ckpt
