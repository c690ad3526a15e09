#include "plan/item_extents.h"

#include <algorithm>
#include <string_view>

#include "plan/wire.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kExtentsMagic = "TCEX";
constexpr uint32_t kExtentsVersion = 1;
constexpr int64_t kEndOfAll = int64_t{1} << 61;

bool read_extents(WireReader* reader, std::vector<ItemExtent>* out) {
  int64_t count;
  // An extent has at least three bytes: larger counts are malformed.
  if (!reader->varint(&count) || count > reader->left() / 3) return false;
  out->reserve(static_cast<size_t>(count));
  int64_t next = 0;
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t skipped;
    int64_t distance;
    int64_t nbytes;
    if (!reader->varint(&skipped) || !reader->varint(&distance) || !reader->varint(&nbytes)) {
      return false;
    }
    ItemExtent extent;
    // All three are below 2^63, so the arithmetic below cannot overflow.
    if (skipped >= kEndOfAll - next) return false;
    extent.item = next + skipped;
    extent.offset = distance % 2 == 0 ? end + distance / 2 : end - (distance / 2 + 1);
    extent.nbytes = nbytes / 2;
    extent.plain = nbytes % 2 == 1;
    if (extent.offset < 0 || extent.offset >= kEndOfAll - extent.nbytes) return false;
    next = extent.item + 1;
    end = extent.offset + extent.nbytes;
    out->push_back(extent);
  }
  return reader->left() == 0;
}

}  // namespace

std::vector<std::byte> encode(std::vector<ItemExtent> extents) {
  std::sort(extents.begin(), extents.end(),
            [](const ItemExtent& a, const ItemExtent& b) { return a.item < b.item; });
  WireWriter out;
  out.varint(std::ssize(extents));
  int64_t next = 0;
  int64_t end = 0;
  for (const ItemExtent& extent : extents) {
    const int64_t distance = extent.offset - end;
    out.varint(extent.item - next);
    out.varint(distance >= 0 ? 2 * distance : -2 * distance - 1);
    out.varint(2 * extent.nbytes + (extent.plain ? 1 : 0));
    next = extent.item + 1;
    end = extent.offset + extent.nbytes;
  }
  return out.finish(kExtentsMagic, kExtentsVersion);
}

Result<std::vector<ItemExtent>> decode_extents(Bytes bytes) {
  ASSIGN_OR_RETURN(const Bytes body,
                   open_wire(bytes, kExtentsMagic, kExtentsVersion, "a list of extents"));
  WireReader reader(body);
  std::vector<ItemExtent> out;
  if (!read_extents(&reader, &out)) {
    return corruption("a list of extents of ", bytes.size(), " bytes is unsound");
  }
  return out;
}

}  // namespace torch_ckpt
