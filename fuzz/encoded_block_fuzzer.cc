// Decodes arbitrary bytes as an encoded block, or encodes arbitrary values. The first byte has
// options, and the next two bytes the length of the block in units:
//   bits 0, 1  the unit: 1, 2, 4 or 8 bytes
//   bit 2      the other bytes are the values of both versions of a block, one after the other

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "codec/encoded_block.h"
#include "codec/raw_block.h"
#include "codec/xor.h"
#include "codec/zstd.h"

namespace torch_ckpt {
namespace {

using ByteVector = std::vector<std::byte>;

void require(bool condition, const char* property) {
  if (condition) return;
  std::cerr << "violated: " << property << std::endl;
  std::abort();
}

void check_versions(const ByteVector& base, const ByteVector& result, int64_t unit) {
  ByteVector snapshot = base;
  BlockComparison comparison;
  const RawBlock raw = comparison.take(snapshot, result, unit);
  require(snapshot == result, "the snapshot is brought up to date");
  ByteVector encoded;
  require(encode_block(raw, comparison.streams(), encoded).ok(), "any change can be encoded");
  require(encoded.empty() == (base == result), "an unchanged block has no bytes");
  if (encoded.empty()) return;
  // Gaps of 255 and more need several bytes. Each stream has a head.
  const int64_t nbytes = std::ssize(base);
  require(std::ssize(encoded) <= nbytes + nbytes / 255 + 16 + 3 * unit, "a block does not grow");
  ByteVector values(base.size(), std::byte{0x5A});
  require(decode_block(encoded, unit, values).ok(), "an encoded block can be decoded");
  xor_bytes(base.data(), values.data(), nbytes);
  require(values == result, "the XOR leads from one version to the other");
}

void check_encoded(Bytes encoded, int64_t unit, int64_t nbytes) {
  ByteVector xors(static_cast<size_t>(nbytes));
  const Status status = decode_block(encoded, unit, xors);
  if (!status.ok()) {
    require(status.code() == StatusCode::kCorruption, "damage is reported as damage");
    return;
  }
  ByteVector again(xors.size(), std::byte{0x5A});
  require(decode_block(encoded, unit, again).ok(), "the second time as well");
  require(xors == again, "every byte of the block is decoded");
  check_versions(ByteVector(xors.size()), xors, unit);
}

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  if (size < 3 || !zstd_available().ok()) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data);
  const ByteVector bytes(begin + 3, begin + size);
  const int64_t unit = int64_t{1} << (data[0] & 3);
  if ((data[0] & 4) == 0) {
    const int64_t units = int64_t{load_le<uint16_t>(begin + 1)} + 1;
    check_encoded(bytes, unit, std::min(units * unit, kBlockNbytes));
    return 0;
  }
  const auto nbytes = std::min(std::ssize(bytes) / 2 / unit * unit, kBlockNbytes);
  if (nbytes == 0) return 0;
  check_versions({bytes.begin(), bytes.begin() + nbytes}, {bytes.end() - nbytes, bytes.end()},
                 unit);
  return 0;
}
