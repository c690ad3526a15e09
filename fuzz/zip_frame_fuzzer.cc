// Frames from arbitrary bytes: the two ends of a slice, as a reader would see them, and the whole
// of it as an archive.
//
// The input is a slice, behind three bytes that choose how it is cut: how much head and tail there
// are beyond what is needed, and whether the slice claims a longer payload than is there.

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

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "does not hold: " << what << std::endl;
  std::abort();
}

// Memory of exactly this length, so that a sanitizer sees a read beyond it.
std::vector<std::byte> copy_of(Bytes bytes) { return {bytes.begin(), bytes.end()}; }

void check_tensor(const StoredTensor& tensor, int64_t nbytes) {
  require(range_within(tensor.payload_offset, tensor.payload_nbytes, nbytes),
          "the payload lies inside the slice");
  require(tensor.sizes.size() == tensor.strides.size(), "there is a stride for each size");
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
  require(!tensor.ok() || needed.ok(), "what is parsed has a head of known length");
  if (!tensor.ok()) return;
  check_tensor(*tensor, nbytes);

  const Result<StoredTensor> again = parse_frame(slice_bytes, slice_bytes, nbytes);
  require(again.ok() && again->payload_offset == tensor->payload_offset &&
              again->sizes == tensor->sizes && again->strides == tensor->strides,
          "how a slice is cut makes no difference");
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

  // The same ends around a payload that a reader has not seen.
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
