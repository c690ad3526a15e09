#pragma once

// The frame around a stored tensor: a zip archive as `torch.save` writes it, so that stock DCP,
// `torch.load` and Python's `zipfile` read the slice (FORMAT.md states every byte).
//
// A slice is head | payload | tail. The head carries the pickle that describes the tensor and ends
// where the payload begins; the tail carries the payload's CRC and the zip directory. `TensorFrame`
// writes frames around contiguous tensors, at sizes that depend on names, dtypes and shapes alone;
// `parse_frame` reads frames that torch.save or we have written.

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/status.h"

namespace torch_ckpt {

// A head is a multiple of kFrameAlignment long (by the zip extra field `FB`), so a slice that
// begins at such a multiple has its payload at one. `plan/layout` places large payloads at coarser
// boundaries by leaving a gap *before* the slice; a frame never depends on where its slice lies.
inline constexpr int64_t kFrameAlignment = 64;

class TensorFrame {
 public:
  // The frame of a contiguous tensor, whatever its place in the file.
  // Errors: kInvalidArgument for a negative size, more than 64 sizes, or sizes whose product
  // overflows (a 0 counting as 1, as in strides).
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

// A tensor as a slice stores it. Elements lie at storage_offset + sum(index[d] * strides[d]) of the
// payload, which `parse_frame` has checked to lie inside it. A tensor without elements has offset 0
// and the strides of a contiguous one, whatever its slice says.
struct StoredTensor {
  DType dtype = DType::kUInt8;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // In elements.
  int64_t storage_offset = 0;    // In elements.
  int64_t payload_offset = 0;    // In bytes, from the start of the slice.
  int64_t payload_nbytes = 0;
  uint32_t payload_crc = 0;  // 0 where torch.save was told not to compute it.
};

// Checks that every element lies inside the payload, and gives a tensor without elements the place
// that a StoredTensor has. Requires: there are as many strides as sizes, and none is negative.
// Errors: kCorruption.
Status check_elements(StoredTensor& tensor);

// How many bytes at the start of a slice of `nbytes` bytes `parse_frame` needs to see, read off
// `tail`, the last bytes of the slice (at least kFrameTailNbytes of them, or all).
// Errors: as parse_frame.
inline constexpr int64_t kFrameTailNbytes = 4096;
Result<int64_t> frame_head_nbytes(Bytes tail, int64_t nbytes);

// Reads a frame from the first and the last bytes of its slice (which may overlap).
// Errors: kCorruption for bytes that no torch.save has written; kUnsupported for a sound archive
// that holds something other than a plain strided tensor, which is torch's to read, or for a head
// shorter than frame_head_nbytes; kInvalidArgument for a tail that is too short.
Result<StoredTensor> parse_frame(Bytes head, Bytes tail, int64_t nbytes);

// Checks every record of a whole zip archive against its CRC-32, and its headers against its
// directory. Bytes that neither begin nor end like an archive pass, and so does a compressed one.
// Unless `strict`, so does any that torch.save cannot have written: it is somebody else's.
// Errors: kCorruption.
Status verify_archive(Bytes archive, bool strict);

}  // namespace torch_ckpt
