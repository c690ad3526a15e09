#include "codec/encoded_block.h"

#include <array>
#include <cstring>

#include "codec/zstd.h"

namespace torch_ckpt {
namespace {

// How a stream is stored.
constexpr std::byte kAsIs{0};
constexpr std::byte kZstd{1};

constexpr int64_t kGapsHeadNbytes = 5;    // Kind, count - 1, gaps_nbytes - 1.
constexpr int64_t kStreamHeadNbytes = 3;  // How it is stored, length - 1.

void append_length(std::vector<std::byte>& out, int64_t nbytes) {
  std::array<std::byte, 2> bytes;
  store_le(bytes.data(), static_cast<uint16_t>(nbytes - 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

Status append_stream(Bytes stream, std::vector<std::byte>& out) {
  const auto head = static_cast<int64_t>(out.size());
  const int64_t body = head + kStreamHeadNbytes;
  out.resize(static_cast<size_t>(body + zstd_bound(ssize(stream))));
  ASSIGN_OR_RETURN(int64_t nbytes, zstd_compress(stream, out.data() + body));
  out[static_cast<size_t>(head)] = kZstd;
  if (nbytes >= ssize(stream)) {
    nbytes = ssize(stream);
    out[static_cast<size_t>(head)] = kAsIs;
    std::memcpy(out.data() + body, stream.data(), stream.size());
  }
  store_le(out.data() + head + 1, static_cast<uint16_t>(nbytes - 1));
  out.resize(static_cast<size_t>(body + nbytes));
  return ok_status();
}

// Writes the plane of high bytes, given the numbers of `wide` units and then their high bytes.
void spread_high_bytes(const std::byte* numbers, int64_t wide, MutableBytes plane) {
  std::memset(plane.data(), 0, plane.size());
  const std::byte* const bytes = numbers + 2 * wide;
  for (int64_t i = 0; i < wide; ++i) {
    uint16_t number;
    std::memcpy(&number, numbers + 2 * i, sizeof(number));
    plane[number] = bytes[i];
  }
}

// Reads the streams of an encoded block one after another.
class Streams {
 public:
  explicit Streams(Bytes left) : left_(left) {}

  // Reads the next stream, of exactly `out.size()` bytes.
  Status read(MutableBytes out) {
    if (ssize(left_) < kStreamHeadNbytes) return corruption("an encoded block is too short");
    const std::byte how = left_[0];
    const int64_t nbytes = int64_t{load_le<uint16_t>(left_.data() + 1)} + 1;
    if (!range_within(kStreamHeadNbytes, nbytes, ssize(left_))) {
      return corruption("an encoded block is too short");
    }
    const Bytes body = slice(left_, kStreamHeadNbytes, nbytes);
    left_ = left_.subspan(static_cast<size_t>(kStreamHeadNbytes + nbytes));
    if (how == kZstd) return zstd_decompress(body, out);
    if (how != kAsIs || body.size() != out.size()) {
      return corruption("an encoded block has an invalid stream");
    }
    std::memcpy(out.data(), body.data(), body.size());
    return ok_status();
  }

  Status check_end() const {
    if (left_.empty()) return ok_status();
    return corruption("an encoded block has ", left_.size(), " surplus bytes");
  }

 private:
  Bytes left_;
};

template <typename Unit>
Unit join(const std::byte* planes, int64_t count, int64_t i) {
  Unit bits = 0;
  for (size_t plane = 0; plane < sizeof(Unit); ++plane) {
    const auto byte = static_cast<Unit>(planes[static_cast<int64_t>(plane) * count + i]);
    bits = static_cast<Unit>(bits | static_cast<Unit>(byte << (8 * plane)));
  }
  return bits;
}

template <typename Unit>
Status scatter(Bytes gaps, const std::byte* planes, int64_t count, MutableBytes xors) {
  const auto units = static_cast<int64_t>(xors.size() / sizeof(Unit));
  std::memset(xors.data(), 0, xors.size());
  int64_t position = 0;
  int64_t n = 0;
  for (const std::byte gap : gaps) {
    position += static_cast<int64_t>(gap);
    if (gap == std::byte{255}) continue;
    if (position >= units || n == count) {
      return corruption("an encoded block has a gap beyond its end");
    }
    const Unit bits = join<Unit>(planes, count, n++);
    std::memcpy(xors.data() + position * static_cast<int64_t>(sizeof(Unit)), &bits, sizeof(Unit));
    ++position;
  }
  if (n != count) return corruption("an encoded block has ", n, " gaps, expected ", count);
  return ok_status();
}

template <typename Unit>
Status decode(Bytes encoded, MutableBytes xors) {
  const auto units = static_cast<int64_t>(xors.size() / sizeof(Unit));
  if (encoded.empty()) return corruption("an encoded block is empty");
  const auto kind = static_cast<BlockKind>(encoded[0]);
  std::array<std::byte, kMaxRawNbytes> memory;
  if (kind == BlockKind::kPlanes) {
    Streams streams(encoded.subspan(1));
    for (int64_t plane = 0; plane < static_cast<int64_t>(sizeof(Unit)); ++plane) {
      RETURN_IF_ERROR(streams.read(slice(MutableBytes(memory), plane * units, units)));
    }
    RETURN_IF_ERROR(streams.check_end());
    for (int64_t i = 0; i < units; ++i) {
      const Unit bits = join<Unit>(memory.data(), units, i);
      std::memcpy(xors.data() + i * static_cast<int64_t>(sizeof(Unit)), &bits, sizeof(Unit));
    }
    return ok_status();
  }
  if (kind != BlockKind::kGaps) {
    return corruption("an encoded block is of the unknown kind ", static_cast<int>(encoded[0]));
  }
  if (ssize(encoded) < kGapsHeadNbytes) return corruption("an encoded block is too short");
  const int64_t count = int64_t{load_le<uint16_t>(encoded.data() + 1)} + 1;
  const int64_t gaps_nbytes = int64_t{load_le<uint16_t>(encoded.data() + 3)} + 1;
  const auto unit = static_cast<int64_t>(sizeof(Unit));
  if (count > units || gaps_nbytes + count * unit > kMaxRawNbytes) {
    return corruption("an encoded block changes ", count, " of ", units, " elements");
  }
  Streams streams(encoded.subspan(kGapsHeadNbytes));
  const MutableBytes gaps = slice(MutableBytes(memory), 0, gaps_nbytes);
  RETURN_IF_ERROR(streams.read(gaps));
  for (int64_t plane = 0; plane < unit; ++plane) {
    RETURN_IF_ERROR(streams.read(slice(MutableBytes(memory), gaps_nbytes + plane * count, count)));
  }
  RETURN_IF_ERROR(streams.check_end());
  return scatter<Unit>(gaps, memory.data() + gaps_nbytes, count, xors);
}

}  // namespace

Status encode_block(const RawBlock& block, const std::byte* streams, std::vector<std::byte>& out) {
  RETURN_IF_ERROR(zstd_available());
  if (block.kind == BlockKind::kUnchanged) return ok_status();
  out.push_back(static_cast<std::byte>(block.kind));
  if (block.kind == BlockKind::kGaps) {
    append_length(out, block.count);
    append_length(out, block.gaps_nbytes);
    RETURN_IF_ERROR(append_stream({streams, static_cast<size_t>(block.gaps_nbytes)}, out));
  }
  const auto count = static_cast<size_t>(block.count);
  const std::byte* plane = streams + block.gaps_nbytes;
  if (block.wide < block.count) {
    RETURN_IF_ERROR(append_stream({plane, count}, out));
    std::array<std::byte, kBlockNbytes / 4> whole;
    spread_high_bytes(plane + count, block.wide, slice(MutableBytes(whole), 0, block.count));
    return append_stream({whole.data(), count}, out);
  }
  for (int32_t p = 0; p < block.unit; ++p, plane += count) {
    RETURN_IF_ERROR(append_stream({plane, count}, out));
  }
  return ok_status();
}

Status decode_block(Bytes encoded, int64_t unit, MutableBytes xors) {
  RETURN_IF_ERROR(zstd_available());
  switch (unit) {
    case 1:
      return decode<uint8_t>(encoded, xors);
    case 2:
      return decode<uint16_t>(encoded, xors);
    case 4:
      return decode<uint32_t>(encoded, xors);
    default:
      return decode<uint64_t>(encoded, xors);
  }
}

}  // namespace torch_ckpt
