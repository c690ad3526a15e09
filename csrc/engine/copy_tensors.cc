#include "engine/copy_tensors.h"

#include <algorithm>
#include <cstring>
#include <mutex>
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

Status copy_part(const Part& part, MutableBytes memory) {
  const LiveTensor& tensor = part.copy->tensor;
  const int64_t size = itemsize(tensor.dtype);
  const int64_t begin = part.begin * size;
  const int64_t nbytes = part.end * size - begin;
  const MutableBytes out = slice(memory, part.copy->offset + begin, nbytes);
  if (tensor.device == &cpu_device() && is_contiguous(tensor)) {
    copy_past_caches({tensor.data + begin, static_cast<size_t>(nbytes)}, out.data());
    return ok_status();
  }
  return pack_elements(tensor, part.begin, part.end, out);
}

}  // namespace

Status copy_tensors(std::span<const PackedCopy> copies, MutableBytes memory, int threads) {
  std::vector<Part> parts;
  for (const PackedCopy& copy : copies) {
    const int64_t size = itemsize(copy.tensor.dtype);
    const auto numel = checked_numel(copy.tensor.sizes);
    const auto nbytes = numel ? checked_mul(*numel, size) : std::nullopt;
    if (!nbytes || !range_within(copy.offset, *nbytes, ssize(memory))) {
      return invalid_argument("cannot copy '", copy.tensor.name, "', ", nbytes.value_or(-1),
                              " bytes, to ", copy.offset, " of a snapshot of ", ssize(memory));
    }
    const int64_t most = kPartNbytes / size;
    for (int64_t begin = 0; begin < *numel; begin += most) {
      parts.push_back({&copy, begin, std::min(begin + most, *numel)});
    }
  }
  std::mutex mutex;
  Status first;
  share(std::ssize(parts), threads, [&](int64_t i) {
    const Status status = copy_part(parts[static_cast<size_t>(i)], memory);
    if (status.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    if (first.ok()) first = status;
  });
  return first;
}

}  // namespace torch_ckpt
