#include "format/checked_blocks.h"

#include <algorithm>

#include "base/block_sums.h"
#include "base/xxh3.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kBlock = CheckedBlocks::kBlockNbytes;
constexpr auto kSumNbytes = static_cast<int64_t>(sizeof(uint64_t));

int64_t block_count(int64_t nbytes) { return BlockGrid::block_count(nbytes, kBlock); }

}  // namespace

bool CheckedBlocks::is_whole(const Place& place) {
  return place.table.nbytes == block_count(place.body.nbytes) * kSumNbytes &&
         place.top.nbytes == block_count(place.table.nbytes) * kSumNbytes &&
         place.top.nbytes <= kBlock;
}

CheckedBlocks::CheckedBlocks(ReadAt read, const Place& place, int64_t cache_nbytes,
                             std::string where)
    : read_(std::move(read)),
      place_(place),
      max_blocks_(static_cast<size_t>(std::max<int64_t>(cache_nbytes / kBlock, 2))),
      where_(std::move(where)) {}

Status CheckedBlocks::load_top() const {
  if (!top_.empty()) return ok_status();
  std::vector<std::byte> top(static_cast<size_t>(place_.top.nbytes));
  RETURN_IF_ERROR(read_(place_.top.offset, top));
  if (xxh3(top) != place_.top_sum) {
    return corruption("cannot read ", where_, ": its checksums at ", place_.top.offset,
                      " fail their own checksum");
  }
  top_ = std::move(top);
  return ok_status();
}

Result<uint64_t> CheckedBlocks::sum_of(Layer layer, int64_t number) const {
  if (layer == Layer::kTable) {
    RETURN_IF_ERROR(load_top());
    return load_le<uint64_t>(top_.data() + number * kSumNbytes);
  }
  ASSIGN_OR_RETURN(const Bytes sums, block(Layer::kTable, number / kSumsInBlock));
  return load_le<uint64_t>(sums.data() + number % kSumsInBlock * kSumNbytes);
}

Result<Bytes> CheckedBlocks::block(Layer layer, int64_t number) const {
  const int64_t key = layer == Layer::kBody ? number : -1 - number;
  if (const auto cached = cached_.find(key); cached != cached_.end()) {
    used_.splice(used_.begin(), used_, cached->second);
    return Bytes(cached->second->bytes);
  }
  ASSIGN_OR_RETURN(const uint64_t sum, sum_of(layer, number));
  const Region& region = layer == Layer::kBody ? place_.body : place_.table;
  const int64_t begin = number * kBlock;
  Block made{key, {}};
  if (used_.size() >= max_blocks_) {  // Reuse the memory of the evicted block.
    cached_.erase(used_.back().key);
    made.bytes = std::move(used_.back().bytes);
    used_.pop_back();
  }
  made.bytes.resize(static_cast<size_t>(std::min(kBlock, region.nbytes - begin)));
  RETURN_IF_ERROR(read_(region.offset + begin, made.bytes));
  if (xxh3(made.bytes) != sum) {
    return corruption("cannot read ", where_, ": it fails its checksum in the ", made.bytes.size(),
                      " bytes at ", region.offset + begin);
  }
  used_.push_front(std::move(made));
  cached_[key] = used_.begin();
  return Bytes(used_.front().bytes);
}

Status CheckedBlocks::read(int64_t offset, MutableBytes into) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t at = offset - place_.body.offset;
  while (!into.empty()) {
    ASSIGN_OR_RETURN(const Bytes found, block(Layer::kBody, at / kBlock));
    const Bytes rest = found.subspan(static_cast<size_t>(at % kBlock));
    const size_t nbytes = std::min(rest.size(), into.size());
    std::copy_n(rest.begin(), nbytes, into.begin());
    into = into.subspan(nbytes);
    at += static_cast<int64_t>(nbytes);
  }
  return ok_status();
}

Status CheckedBlocks::check(int64_t offset, int64_t nbytes) const {
  if (nbytes == 0) return ok_status();
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t at = offset - place_.body.offset;
  for (int64_t number = at / kBlock; number <= (at + nbytes - 1) / kBlock; ++number) {
    RETURN_IF_ERROR(block(Layer::kBody, number).status());
  }
  return ok_status();
}

Result<std::vector<Region>> CheckedBlocks::damage() const {
  std::vector<Region> out;
  for (int64_t number = 0; number < block_count(place_.body.nbytes); ++number) {
    const int64_t begin = number * kBlock;
    const Region region = {place_.body.offset + begin,
                           std::min(kBlock, place_.body.nbytes - begin)};
    const Status status = check(region.offset, region.nbytes);
    if (status.ok()) continue;
    if (status.code() != StatusCode::kCorruption) return status;
    if (!out.empty() && out.back().offset + out.back().nbytes == region.offset) {
      out.back().nbytes += region.nbytes;
    } else {
      out.push_back(region);
    }
  }
  return out;
}

}  // namespace torch_ckpt
