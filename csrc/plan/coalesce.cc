#include "plan/coalesce.h"

#include <algorithm>
#include <numeric>

namespace torch_ckpt {

Reads coalesce(std::span<const ByteRange> wanted, int64_t max_nbytes, int64_t max_gap) {
  Reads out;
  out.order.resize(wanted.size());
  std::iota(out.order.begin(), out.order.end(), int64_t{0});
  std::stable_sort(out.order.begin(), out.order.end(), [&](int64_t a, int64_t b) {
    return wanted[static_cast<size_t>(a)].begin < wanted[static_cast<size_t>(b)].begin;
  });

  for (int64_t i = 0; i < static_cast<int64_t>(out.order.size()); ++i) {
    const ByteRange& range = wanted[static_cast<size_t>(out.order[static_cast<size_t>(i)])];
    if (!out.reads.empty()) {
      Read& last = out.reads.back();
      const int64_t end = std::max(last.range.end, range.end);
      const int64_t worthwhile = std::min(max_gap, std::max(last.wanted_nbytes, kSmallGap));
      if (range.begin - last.range.end <= worthwhile && end - last.range.begin <= max_nbytes) {
        last.wanted_nbytes += end - std::max(last.range.end, std::min(range.begin, end));
        last.range.end = end;
        last.last = i + 1;
        continue;
      }
    }
    out.reads.push_back({range, i, i + 1, range.nbytes()});
  }
  return out;
}

}  // namespace torch_ckpt
