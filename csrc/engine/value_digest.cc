#include "engine/value_digest.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/parallel_for.h"
#include "base/xxh3.h"
#include "engine/live_tensor.h"

namespace torch_ckpt {
namespace {

// Strided elements are packed into this much memory at a time. It has many rows: those of a
// transposed tensor share each line of its memory.
constexpr int64_t kPackNbytes = int64_t{1} << 20;

// Starting a thread takes as long as some samples do.
constexpr int64_t kSamplesPerThread = 64;

// Elements [begin, end) of a tensor.
struct Piece {
  const TensorView* tensor;
  int64_t begin;
  int64_t end;
};

uint64_t known(uint64_t digest) { return digest == kUnknownDigest ? 1 : digest; }

Digest128 digest_of_pieces(std::span<const Digest128> pieces) {
  Digest128 digest = xxh3_128(std::as_bytes(pieces));
  digest.low = known(digest.low);
  return digest;
}

int64_t numel_of(const TensorView& tensor) {
  int64_t numel = 1;
  for (const int64_t size : tensor.sizes) numel *= size;
  return numel;
}

bool is_contiguous(const TensorView& tensor) {
  return torch_ckpt::is_contiguous(tensor.sizes, tensor.strides, itemsize(tensor.dtype));
}

// Fetches all blocks of a sample at the same time. The blocks of a long tensor are in no cache.
void prefetch(const Sample& sample, const std::byte* data, int64_t size) {
  constexpr int64_t kCacheLine = 64;
  for (const int64_t first : sample.firsts) {
    for (int64_t at = 0; at < sample.count * size; at += kCacheLine) {
      __builtin_prefetch(data + first * size + at);
    }
  }
}

uint64_t sampled_digest(const TensorView& tensor) {
  const int64_t size = itemsize(tensor.dtype);
  const int64_t numel = numel_of(tensor);
  const bool contiguous = is_contiguous(tensor);
  if (numel == 0) return known(xxh3({}));
  if (contiguous && numel * size <= kSampleBlocks * kSampleBlockNbytes) {
    return known(xxh3({tensor.data, static_cast<size_t>(numel * size)}));
  }
  std::array<std::byte, kSampleBlocks * kSampleBlockNbytes> memory;
  const Sample sample = sample_of(numel, size);
  const LiveTensor live = contiguous ? LiveTensor{} : to_live(tensor);
  if (contiguous) prefetch(sample, tensor.data, size);
  int64_t end = 0;
  for (const int64_t first : sample.firsts) {
    const MutableBytes out = slice(MutableBytes(memory), end, sample.count * size);
    if (contiguous) {
      std::memcpy(out.data(), tensor.data + first * size, out.size());
    } else {
      pack_elements(live, first, first + sample.count, out);
    }
    end += ssize(out);
  }
  return known(xxh3(slice(Bytes(memory), 0, end)));
}

Digest128 piece_digest(const Piece& piece) {
  const int64_t size = itemsize(piece.tensor->dtype);
  if (is_contiguous(*piece.tensor)) {
    const auto nbytes = static_cast<size_t>((piece.end - piece.begin) * size);
    return xxh3_128({piece.tensor->data + piece.begin * size, nbytes});
  }
  const LiveTensor live = to_live(*piece.tensor);
  Xxh3Stream stream;
  const int64_t nbytes = (piece.end - piece.begin) * size;
  std::vector<std::byte> memory(static_cast<size_t>(std::min(nbytes, kPackNbytes)));
  for (int64_t begin = piece.begin; begin < piece.end; begin += kPackNbytes / size) {
    const int64_t end = std::min(begin + kPackNbytes / size, piece.end);
    const MutableBytes out = slice(MutableBytes(memory), 0, (end - begin) * size);
    pack_elements(live, begin, end, out);
    stream.update(out);
  }
  return stream.finish_128();
}

}  // namespace

std::vector<Digest128> full_digests(std::span<const TensorView* const> tensors, int threads) {
  std::vector<Piece> pieces;
  std::vector<size_t> first_piece;
  for (const TensorView* tensor : tensors) {
    first_piece.push_back(pieces.size());
    const int64_t numel = numel_of(*tensor);
    const int64_t most = kDigestPieceNbytes / itemsize(tensor->dtype);
    for (int64_t begin = 0; begin < numel; begin += most) {
      pieces.push_back({tensor, begin, std::min(begin + most, numel)});
    }
  }
  first_piece.push_back(pieces.size());
  std::vector<Digest128> of_pieces(pieces.size());
  parallel_for(std::ssize(pieces), threads, [&](int64_t i) {
    of_pieces[static_cast<size_t>(i)] = piece_digest(pieces[static_cast<size_t>(i)]);
  });
  std::vector<Digest128> digests;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t count = first_piece[i + 1] - first_piece[i];
    digests.push_back(digest_of_pieces(std::span(of_pieces).subspan(first_piece[i], count)));
  }
  return digests;
}

void DigestStream::update(Bytes bytes) {
  while (!bytes.empty()) {
    const int64_t count = std::min(ssize(bytes), kDigestPieceNbytes - filled_);
    piece_.update(slice(bytes, 0, count));
    filled_ += count;
    bytes = bytes.subspan(static_cast<size_t>(count));
    if (filled_ == kDigestPieceNbytes) end_piece();
  }
}

Digest128 DigestStream::finish() {
  if (filled_ > 0) end_piece();
  const Digest128 digest = digest_of_pieces(pieces_);
  pieces_.clear();
  return digest;
}

void DigestStream::end_piece() {
  pieces_.push_back(piece_.finish_128());
  filled_ = 0;
}

Sample sample_of(int64_t numel, int64_t itemsize) {
  const int64_t count = kSampleBlockNbytes / itemsize;
  if (numel <= kSampleBlocks * count) return {{0}, numel};
  Sample sample = {{}, count};
  const int64_t step = (numel - count) / (kSampleBlocks - 1);
  for (int64_t i = 0; i + 1 < kSampleBlocks; ++i) sample.firsts.push_back(i * step);
  sample.firsts.push_back(numel - count);
  return sample;
}

std::vector<uint64_t> value_digests(std::span<const TensorView* const> tensors, bool full,
                                    int threads) {
  std::vector<uint64_t> digests(tensors.size());
  if (full) {
    std::ranges::transform(full_digests(tensors, threads), digests.begin(), &Digest128::low);
    return digests;
  }
  const int64_t count = std::ssize(tensors);
  const auto useful = static_cast<int>(std::min<int64_t>(threads, 1 + count / kSamplesPerThread));
  parallel_for(count, useful, [&](int64_t i) {
    digests[static_cast<size_t>(i)] = sampled_digest(*tensors[static_cast<size_t>(i)]);
  });
  return digests;
}

}  // namespace torch_ckpt
