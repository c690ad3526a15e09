// Parses arbitrary bytes as a frame, from the two ends of a slice, and verifies the whole slice as
// an archive.
//
// The input is three option bytes and a slice. The first two bytes set how much head and tail the
// parser gets beyond its minimum. The third byte adds a gap, as a payload that was not read.

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/strided.h"
#include "format/zip_frame.h"

namespace torch_ckpt {
namespace {

void require(bool condition, const char* property) {
  if (condition) return;
  std::cerr << "violated: " << property << std::endl;
  std::abort();
}

// Copies bytes to memory of exactly their length, so that a sanitizer detects a read beyond it.
std::vector<std::byte> copy_of(Bytes bytes) { return {bytes.begin(), bytes.end()}; }

void check_tensor(const StoredTensor& tensor, int64_t nbytes) {
  require(range_within(tensor.payload_offset, tensor.payload_nbytes, nbytes),
          "the payload lies inside the slice");
  require(tensor.sizes.size() == tensor.strides.size(), "each size has a stride");
  const auto numel = checked_numel(tensor.sizes);
  const int64_t size = itemsize(tensor.dtype);
  require(numel && checked_mul(*numel, size).has_value(), "the elements can be counted");
  if (*numel == 0) {
    require(tensor.storage_offset == 0, "a tensor without elements begins at 0");
    return;
  }
  std::optional<int64_t> last = tensor.storage_offset;
  for (size_t d = 0; d < tensor.sizes.size() && last; ++d) {
    require(tensor.sizes[d] > 0 && tensor.strides[d] >= 0, "sizes and strides are not negative");
    const auto reach = checked_mul(tensor.sizes[d] - 1, tensor.strides[d]);
    last = reach ? checked_add(*last, *reach) : std::nullopt;
  }
  const auto end = last ? checked_mul(*last, size) : std::nullopt;
  require(end && range_within(*end, size, tensor.payload_nbytes),
          "the elements lie inside the payload");
}

void check_slice(Bytes slice_bytes, int64_t more_head, int64_t more_tail) {
  const int64_t nbytes = ssize(slice_bytes);
  const int64_t tail_nbytes = std::min(nbytes, kFrameTailNbytes + more_tail);
  const auto tail = copy_of(slice(slice_bytes, nbytes - tail_nbytes, tail_nbytes));
  const Result<int64_t> needed = frame_head_nbytes(tail, nbytes);
  int64_t head_nbytes = std::min(more_head, nbytes);
  if (needed.ok()) {
    require(*needed >= 0 && *needed <= nbytes, "the head lies inside the slice");
    const auto shorter = copy_of(slice(slice_bytes, 0, std::min(more_head, *needed)));
    (void)parse_frame(shorter, tail, nbytes);
    head_nbytes = std::min(nbytes, *needed + more_head);
  }
  const auto head = copy_of(slice(slice_bytes, 0, head_nbytes));
  const Result<StoredTensor> tensor = parse_frame(head, tail, nbytes);
  require(!tensor.ok() || needed.ok(), "a parsed frame has a head of known length");
  if (!tensor.ok()) return;
  check_tensor(*tensor, nbytes);

  const Result<StoredTensor> again = parse_frame(slice_bytes, slice_bytes, nbytes);
  require(again.ok() && again->payload_offset == tensor->payload_offset &&
              again->sizes == tensor->sizes && again->strides == tensor->strides,
          "the lengths of head and tail do not change the result");
}

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  constexpr size_t kChoices = 3;
  if (size < kChoices) return 0;
  const Bytes bytes(reinterpret_cast<const std::byte*>(data) + kChoices, size - kChoices);
  const auto archive = copy_of(bytes);
  (void)verify_archive(archive, true);
  (void)verify_archive(archive, false);
  check_slice(archive, data[0] * 16, data[1] * 16);

  // Parse the same ends again, with a gap between them as a payload that was not read.
  if (data[2] == 0) return 0;
  const int64_t gap = int64_t{1} << (data[2] % 62);
  const auto nbytes = checked_add(ssize(archive), gap);
  if (!nbytes) return 0;
  const auto middle = static_cast<int64_t>(archive.size() / 256 * data[0]);
  const auto head = copy_of(slice(Bytes(archive), 0, middle));
  const auto tail = copy_of(Bytes(archive).subspan(static_cast<size_t>(middle)));
  const Result<StoredTensor> tensor = parse_frame(head, tail, *nbytes);
  if (tensor.ok()) check_tensor(*tensor, *nbytes);
  return 0;
}
