#include "plan/wire.h"

#include <algorithm>

#include "base/xxh3.h"

namespace torch_ckpt {
namespace {

constexpr size_t kMagicNbytes = 4;
constexpr size_t kHeadNbytes = kMagicNbytes + sizeof(uint32_t);
constexpr size_t kSumNbytes = sizeof(uint64_t);

}  // namespace

std::vector<std::byte> WireWriter::finish(std::string_view magic, uint32_t version) const {
  std::vector<std::byte> out(kHeadNbytes + bytes_.size() + kSumNbytes);
  const Bytes head = as_bytes(magic);
  std::copy(head.begin(), head.end(), out.begin());
  store_le(out.data() + kMagicNbytes, version);
  std::copy(bytes_.begin(), bytes_.end(), out.begin() + kHeadNbytes);
  const size_t end = out.size() - kSumNbytes;
  store_le(out.data() + end, xxh3(Bytes(out).first(end)));
  return out;
}

uint32_t wire_version(Bytes bytes) {
  return bytes.size() < kHeadNbytes ? 0 : load_le<uint32_t>(bytes.data() + kMagicNbytes);
}

Result<Bytes> open_wire(Bytes bytes, std::string_view magic, uint32_t version,
                        std::string_view what) {
  if (bytes.size() < kHeadNbytes + kSumNbytes) {
    return corruption(what, " of ", bytes.size(), " bytes is cut off");
  }
  if (as_text(bytes.first(kMagicNbytes)) != magic) {
    return corruption("cannot read ", what, " from ", bytes.size(), " bytes: the magic is wrong");
  }
  const size_t end = bytes.size() - kSumNbytes;
  if (load_le<uint64_t>(bytes.data() + end) != xxh3(bytes.first(end))) {
    return corruption(what, " of ", bytes.size(), " bytes fails its checksum");
  }
  const auto found = load_le<uint32_t>(bytes.data() + kMagicNbytes);
  if (found != version) {
    return unsupported(what, " has version ", found, "; this build reads ", version,
                       ": all ranks must run the same release");
  }
  return bytes.subspan(kHeadNbytes, end - kHeadNbytes);
}

}  // namespace torch_ckpt
