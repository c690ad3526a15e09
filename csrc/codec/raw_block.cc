#include "codec/raw_block.h"

#include <algorithm>

#include "base/xxh3.h"
#include "codec/compare_variant.h"

namespace torch_ckpt {
namespace {

// What is compared before it is digested, while the next piece is fetched from memory.
constexpr size_t kPieceNbytes = 4096;

const CompareVariant& fastest() {
  static const CompareVariant& variant = []() -> const CompareVariant& {
    if (const CompareVariant* avx512 = compare_avx512(); avx512 != nullptr) return *avx512;
    if (const CompareVariant* avx2 = compare_avx2(); avx2 != nullptr) return *avx2;
    return kCompareOfThisFile;
  }();
  return variant;
}

}  // namespace

struct BlockComparison::Scratch {
  CompareScratch compare;
  unsigned char streams[kMaxRawNbytes];
  Xxh3Stream digest;
};

BlockComparison::BlockComparison() : scratch_(new Scratch) {}
BlockComparison::~BlockComparison() = default;

RawBlock BlockComparison::take(MutableBytes snapshot, Bytes source, int64_t unit) {
  auto* const to = reinterpret_cast<unsigned char*>(snapshot.data());
  const auto* const from = reinterpret_cast<const unsigned char*>(source.data());
  size_t changed = 0;
  size_t digested = 0;
  for (size_t begin = 0; begin < source.size(); begin += kPieceNbytes) {
    const size_t end = std::min(begin + kPieceNbytes, source.size());
    changed = fastest().compare(to, from, begin, end, static_cast<size_t>(unit), &scratch_->compare,
                                changed);
    if (changed == 0) continue;
    scratch_->digest.update(source.subspan(digested, end - digested));
    digested = end;
  }
  RawBlock block = {.unit = static_cast<int32_t>(unit), .changed = static_cast<int32_t>(changed)};
  if (changed == 0) return block;
  const WrittenStreams written = fastest().write_streams(
      &scratch_->compare, changed, source.size(), static_cast<size_t>(unit), scratch_->streams);
  block.kind = written.gaps_nbytes > 0 ? BlockKind::kGaps : BlockKind::kPlanes;
  block.count = static_cast<int32_t>(written.count);
  block.gaps_nbytes = static_cast<int32_t>(written.gaps_nbytes);
  block.wide = static_cast<int32_t>(written.wide);
  block.digest = scratch_->digest.finish();
  return block;
}

const std::byte* BlockComparison::streams() const {
  return reinterpret_cast<const std::byte*>(scratch_->streams);
}

}  // namespace torch_ckpt
