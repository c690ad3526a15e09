#include "plan/wanted_bytes.h"

#include <algorithm>
#include <utility>

#include "plan/wire.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kReadsMagic = "TCXW";
constexpr uint32_t kReadsVersion = 2;
constexpr int64_t kMaxOffset = int64_t{1} << 61;

}  // namespace

void WantedBytes::add(std::string_view file, const ByteRange& range) {
  if (files_.empty() || files_.back().name != file) files_.push_back({std::string(file), {}});
  std::vector<ByteRange>& ranges = files_.back().ranges;
  if (!ranges.empty() && ranges.back().end == range.begin) {
    ranges.back().end = range.end;
  } else {
    ranges.push_back(range);
  }
}

void WantedBytes::sort() {
  std::ranges::stable_sort(files_, {}, &File::name);
  std::vector<File> merged;
  for (File& file : files_) {
    if (merged.empty() || merged.back().name != file.name) {
      merged.push_back(std::move(file));
    } else {
      std::vector<ByteRange>& ranges = merged.back().ranges;
      ranges.insert(ranges.end(), file.ranges.begin(), file.ranges.end());
    }
  }
  files_ = std::move(merged);
  for (File& file : files_) {
    std::ranges::sort(file.ranges, {}, &ByteRange::begin);
    std::vector<ByteRange> disjoint;
    for (const ByteRange& range : file.ranges) {
      if (!disjoint.empty() && range.begin <= disjoint.back().end) {
        disjoint.back().end = std::max(disjoint.back().end, range.end);
      } else {
        disjoint.push_back(range);
      }
    }
    file.ranges = std::move(disjoint);
  }
}

std::vector<std::byte> WantedBytes::encode() {
  sort();
  WireWriter out;
  out.varint(is_cached_ ? 1 : 0);
  out.varint(std::ssize(files_));
  for (const File& file : files_) {
    out.word(file.name);
    out.varint(std::ssize(file.ranges));
    int64_t at = 0;
    for (const ByteRange& range : file.ranges) {
      out.varint(range.begin - at);
      out.varint(range.nbytes());
      at = range.end;
    }
  }
  return out.finish(kReadsMagic, kReadsVersion);
}

Result<WantedBytes> WantedBytes::decode(Bytes bytes) {
  ASSIGN_OR_RETURN(const Bytes body,
                   open_wire(bytes, kReadsMagic, kReadsVersion, "a list of reads"));
  WireReader in(body);
  WantedBytes out;
  const auto unsound = [] { return corruption("a list of reads is unsound"); };
  int64_t is_cached;
  int64_t files;
  if (!in.varint(&is_cached) || is_cached > 1) return unsound();
  out.is_cached_ = is_cached == 1;
  if (!in.varint(&files) || files > in.left()) return unsound();
  for (int64_t i = 0; i < files; ++i) {
    std::string_view name;
    int64_t ranges;
    if (!in.word(&name) || !in.varint(&ranges) || ranges > in.left()) return unsound();
    if (!out.files_.empty() && out.files_.back().name >= name) return unsound();
    File file{std::string(name), {}};
    int64_t at = 0;
    for (int64_t r = 0; r < ranges; ++r) {
      int64_t gap;
      int64_t nbytes;
      if (!in.varint(&gap) || !in.varint(&nbytes) || nbytes == 0) return unsound();
      if (gap > kMaxOffset - at || nbytes > kMaxOffset - at - gap) return unsound();
      file.ranges.push_back({at + gap, at + gap + nbytes});
      at = file.ranges.back().end;
    }
    out.files_.push_back(std::move(file));
  }
  if (in.left() != 0) return unsound();
  return out;
}

}  // namespace torch_ckpt
