#include "engine/save/snapshot.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/parallel_for.h"
#include "geometry/box.h"
#include "plan/layout.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torch_ckpt {
namespace {

// Unit of work of a thread: long enough for full memory bandwidth, short enough to balance load.
constexpr int64_t kChunkNbytes = int64_t{4} << 20;

// A range of elements of one tensor.
struct Chunk {
  const PackedCopy* copy;
  int64_t begin;
  int64_t end;
};

// Copies like memcpy, but bypasses the caches. The copy is not read soon, and loading the
// overwritten cache lines would cost a third of the time.
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

void copy_chunk(const Chunk& chunk, MutableBytes memory) {
  const LiveTensor& tensor = chunk.copy->tensor;
  const int64_t size = itemsize(tensor.dtype);
  const int64_t begin = chunk.begin * size;
  const int64_t nbytes = chunk.end * size - begin;
  const MutableBytes out = slice(memory, chunk.copy->offset + begin, nbytes);
  if (is_contiguous(tensor)) {
    copy_past_caches({tensor.data + begin, static_cast<size_t>(nbytes)}, out.data());
  } else {
    pack_elements(tensor, chunk.begin, chunk.end, out);
  }
}

// Returns the copy of the whole tensor, packed without gaps from the copy's offset.
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

int64_t place_in_snapshot(int64_t end, int64_t nbytes) {
  return align_up(end, nbytes >= kLargePayload ? kLargeAlignment : kSmallAlignment);
}

Result<std::unique_ptr<Snapshot>> Snapshot::make(MemorySource& source, int64_t nbytes,
                                                 int threads) {
  if (nbytes <= 0) return invalid_argument("cannot make a snapshot of ", nbytes, " bytes");
  ASSIGN_OR_RETURN(Memory memory, source.allocate(nbytes));
  if (const Status status = memory.populate(threads); !status.ok()) {
    return errno_status(status.error_number(),
                        str_cat("cannot allocate ", nbytes, " bytes of snapshot"));
  }
  const MutableBytes bytes = memory.bytes();
  return std::unique_ptr<Snapshot>(new Snapshot(std::move(memory), bytes));
}

void Snapshot::pin_for(const Device& device) {
  if (device.is_host() || pinned_ != nullptr) return;
  if (auto pinned = device.pin(bytes()); pinned.ok()) pinned_ = std::move(*pinned);
}

// A device may write to gaps between its copies. So each call covers copies that are adjacent in
// offset order: one call per device, unless tensors of several devices alternate.
Status Snapshot::pack(std::vector<const PackedCopy*> copies) {
  std::ranges::stable_sort(copies, {}, &PackedCopy::offset);
  for (auto begin = copies.begin(); begin != copies.end();) {
    const Device& device = *(*begin)->tensor.device;
    std::vector<TensorCopy> together;
    auto end = begin;
    for (; end != copies.end() && (*end)->tensor.device == &device; ++end) {
      together.push_back(whole(**end));
    }
    pin_for(device);
    ASSIGN_OR_RETURN(const auto packed, device.pack(together, payload_));
    if (packed != nullptr) RETURN_IF_ERROR(packed->wait());
    begin = end;
  }
  return ok_status();
}

Status Snapshot::copy(std::span<const PackedCopy> copies, int threads) {
  std::vector<Chunk> chunks;
  std::vector<const PackedCopy*> elsewhere;
  for (const PackedCopy& copy : copies) {
    const int64_t size = itemsize(copy.tensor.dtype);
    const auto numel = checked_numel(copy.tensor.sizes);
    const auto nbytes = numel ? checked_mul(*numel, size) : std::nullopt;
    if (!nbytes || !range_within(copy.offset, *nbytes, ssize(payload_))) {
      return invalid_argument("cannot copy '", copy.tensor.name, "', ", nbytes.value_or(-1),
                              " bytes, to ", copy.offset, " of a snapshot of ", ssize(payload_));
    }
    if (!copy.tensor.device->is_host()) {
      if (*nbytes > 0) elsewhere.push_back(&copy);
      continue;
    }
    const int64_t most = kChunkNbytes / size;
    for (int64_t begin = 0; begin < *numel; begin += most) {
      chunks.push_back({&copy, begin, std::min(begin + most, *numel)});
    }
  }
  RETURN_IF_ERROR(pack(std::move(elsewhere)));
  parallel_for(std::ssize(chunks), threads,
               [&](int64_t i) { copy_chunk(chunks[static_cast<size_t>(i)], payload_); });
  return ok_status();
}

}  // namespace torch_ckpt
