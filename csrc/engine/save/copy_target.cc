#include "engine/save/copy_target.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/share.h"
#include "geometry/box.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torch_ckpt {
namespace {

// What a thread takes at a time: long enough to run at the speed of memory, short enough to share.
constexpr int64_t kPartNbytes = int64_t{4} << 20;

// Elements of a tensor.
struct Part {
  const PackedCopy* copy;
  int64_t begin;
  int64_t end;
};

// As memcpy, but past the caches: nobody reads the copy soon, and fetching what it overwrites would
// cost a third of the time.
void copy_past_caches(Bytes from, std::byte* to) {
  const std::byte* in = from.data();
  size_t left = from.size();
#if defined(__SSE2__)
  constexpr size_t kVector = sizeof(__m128i);
  const size_t head =
      std::min((kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector, left);
  std::memcpy(to, in, head);
  in += head;
  to += head;
  left -= head;
  for (; left >= 4 * kVector; left -= 4 * kVector, in += 4 * kVector, to += 4 * kVector) {
    const auto* vectors = reinterpret_cast<const __m128i*>(in);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(vectors);
    const __m128i b = _mm_loadu_si128(vectors + 1);
    const __m128i c = _mm_loadu_si128(vectors + 2);
    const __m128i d = _mm_loadu_si128(vectors + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(to, in, left);
}

void copy_part(const Part& part, MutableBytes memory) {
  const LiveTensor& tensor = part.copy->tensor;
  const int64_t size = itemsize(tensor.dtype);
  const int64_t begin = part.begin * size;
  const int64_t nbytes = part.end * size - begin;
  const MutableBytes out = slice(memory, part.copy->offset + begin, nbytes);
  if (is_contiguous(tensor)) {
    copy_past_caches({tensor.data + begin, static_cast<size_t>(nbytes)}, out.data());
  } else {
    pack_elements(tensor, part.begin, part.end, out);
  }
}

// The whole tensor, one element behind the other from the copy's offset on.
TensorCopy whole(const PackedCopy& from) {
  StridedCopy copy = {.itemsize = itemsize(from.tensor.dtype),
                      .sizes = from.tensor.sizes,
                      .src_strides = from.tensor.strides,
                      .dst_offset = from.offset,
                      .dst_strides = contiguous_strides(from.tensor.sizes)};
  for (int64_t& stride : copy.dst_strides) stride *= copy.itemsize;
  return {from.tensor.data, std::move(copy)};
}

}  // namespace

void CopyTarget::pin_for(const Device& device) {
  if (device.is_host() || is_pinned()) return;
  if (auto pinned = device.pin(bytes()); pinned.ok()) pinned_ = std::move(*pinned);
}

// A device may write between its copies. So each call is for those that lie side by side: one for
// each device, unless tensors of several are mixed.
Status CopyTarget::pack(std::vector<const PackedCopy*> copies, MutableBytes memory) {
  std::ranges::stable_sort(copies, {}, &PackedCopy::offset);
  for (auto begin = copies.begin(); begin != copies.end();) {
    const Device& device = *(*begin)->tensor.device;
    std::vector<TensorCopy> together;
    auto end = begin;
    for (; end != copies.end() && (*end)->tensor.device == &device; ++end) {
      together.push_back(whole(**end));
    }
    pin_for(device);
    ASSIGN_OR_RETURN(const auto packed, device.pack(together, memory));
    if (packed != nullptr) RETURN_IF_ERROR(packed->wait());
    begin = end;
  }
  return ok_status();
}

Status CopyTarget::copy(std::span<const PackedCopy> copies, MutableBytes memory, int threads) {
  std::vector<Part> parts;
  std::vector<const PackedCopy*> elsewhere;
  for (const PackedCopy& copy : copies) {
    const int64_t size = itemsize(copy.tensor.dtype);
    const auto numel = checked_numel(copy.tensor.sizes);
    const auto nbytes = numel ? checked_mul(*numel, size) : std::nullopt;
    if (!nbytes || !range_within(copy.offset, *nbytes, ssize(memory))) {
      return invalid_argument("cannot copy '", copy.tensor.name, "', ", nbytes.value_or(-1),
                              " bytes, to ", copy.offset, " of a snapshot of ", ssize(memory));
    }
    if (!copy.tensor.device->is_host()) {
      if (*nbytes > 0) elsewhere.push_back(&copy);
      continue;
    }
    const int64_t most = kPartNbytes / size;
    for (int64_t begin = 0; begin < *numel; begin += most) {
      parts.push_back({&copy, begin, std::min(begin + most, *numel)});
    }
  }
  RETURN_IF_ERROR(pack(std::move(elsewhere), memory));
  share(std::ssize(parts), threads,
        [&](int64_t i) { copy_part(parts[static_cast<size_t>(i)], memory); });
  return ok_status();
}

}  // namespace torch_ckpt
