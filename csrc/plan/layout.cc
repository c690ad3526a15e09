#include "plan/layout.h"

#include "base/bytes.h"

namespace torch_ckpt {

int64_t next_slice_offset(int64_t end, const SliceNbytes& item) {
  if (item.payload < kLargePayload) return align_up(end, kSmallAlignment);
  return align_up(end + item.head, kLargeAlignment) - item.head;
}

Layout lay_out(std::span<const SliceNbytes> items) {
  Layout layout;
  layout.slices.reserve(items.size());
  for (const SliceNbytes& item : items) {
    const Slice slice = {next_slice_offset(layout.nbytes, item), item};
    layout.nbytes = slice.end();
    layout.slices.push_back(slice);
  }
  return layout;
}

}  // namespace torch_ckpt
