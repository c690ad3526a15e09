#include "engine/publish/difference.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

#include "base/parallel_for.h"
#include "base/xxh3.h"
#include "codec/encoded_block.h"
#include "codec/zstd.h"

namespace torch_ckpt {
namespace {

// Blocks that one thread takes at a time: 1 MiB.
constexpr int64_t kRunBlocks = 16;

// Returns the blocks of one run.
template <typename Block>
std::span<Block> run_of(std::span<Block> blocks, int64_t run) {
  const auto begin = static_cast<size_t>(run * kRunBlocks);
  return blocks.subspan(begin, std::min<size_t>(kRunBlocks, blocks.size() - begin));
}

int64_t nbytes_of(const LiveTensor& tensor) {
  return checked_numel(tensor.sizes).value_or(0) * itemsize(tensor.dtype);
}

MutableBytes block_of(const LiveTensor& snapshot, int64_t block) {
  return {snapshot.data + block * kBlockNbytes,
          static_cast<size_t>(block_nbytes(nbytes_of(snapshot), block))};
}

// Returns the bytes of a block in row-major order. Strided ones are packed into `memory`.
Bytes packed_block(const LiveTensor& source, int64_t block, std::vector<std::byte>& memory) {
  const int64_t nbytes = block_nbytes(nbytes_of(source), block);
  const int64_t begin = block * kBlockNbytes;
  if (is_contiguous(source)) return {source.data + begin, static_cast<size_t>(nbytes)};
  memory.resize(static_cast<size_t>(nbytes));
  const int64_t size = itemsize(source.dtype);
  pack_elements(source, begin / size, (begin + nbytes) / size, memory);
  return memory;
}

Status check(const LiveTensor& snapshot, const LiveTensor& source,
             std::span<const uint64_t> digests) {
  if (snapshot.dtype != source.dtype || snapshot.sizes != source.sizes) {
    return invalid_argument("the snapshot is ", dtype_info(snapshot.dtype).name, " ",
                            to_string(snapshot.sizes), ", and the source is ",
                            dtype_info(source.dtype).name, " ", to_string(source.sizes));
  }
  if (!is_contiguous(snapshot)) return invalid_argument("the snapshot is not contiguous");
  const int64_t blocks = block_count(nbytes_of(snapshot));
  if (std::ssize(digests) != blocks) {
    return invalid_argument("there are ", digests.size(), " digests of ", blocks, " blocks");
  }
  return ok_status();
}

}  // namespace

int64_t BoxDifference::nbytes() const {
  int64_t nbytes = std::ssize(blocks_) * int64_t{sizeof(Block)};
  for (const Block& block : blocks_) nbytes += block.raw.nbytes();
  return nbytes;
}

int64_t BoxDifference::changed_nbytes() const {
  int64_t nbytes = 0;
  for (const Block& block : blocks_) nbytes += int64_t{block.raw.changed} * block.raw.unit;
  return nbytes;
}

// Takes blocks, in memory that it reuses. Used by one thread.
class BoxDifference::Taking {
 public:
  Taking(const LiveTensor& snapshot, const LiveTensor& source, std::span<uint64_t> digests,
         DifferenceMemory& memory)
      : snapshot_(snapshot), source_(source), digests_(digests), memory_(memory) {}

  // Fills the blocks, of which the first one has this number.
  Status take(int64_t number, std::span<Block> blocks) {
    const int64_t unit = unit_of(itemsize(source_.dtype));
    for (Block& block : blocks) {
      const Bytes values = packed_block(source_, number, packed_);
      uint64_t& digest = digests_[static_cast<size_t>(number)];
      block.base = digest;
      block.raw = comparison_.take(block_of(snapshot_, number), values, unit);
      if (block.raw.kind != BlockKind::kUnchanged) {
        digest = block.raw.digest;
        RETURN_IF_ERROR(keep_streams(block));
      }
      block.result = digest;
      ++number;
    }
    return ok_status();
  }

  // Returns the chunks that have the streams. The last one may serve the next difference as well.
  std::vector<std::shared_ptr<DifferenceChunk>> finish() {
    if (!chunks_.empty()) memory_.hand_on(chunks_.back());
    return std::move(chunks_);
  }

 private:
  Status keep_streams(Block& block) {
    const int64_t nbytes = block.raw.nbytes();
    const auto has_room = [nbytes](const DifferenceChunk& chunk) {
      return chunk.filled_nbytes + nbytes <= DifferenceMemory::kChunkNbytes;
    };
    if (chunks_.empty() || !has_room(*chunks_.back())) {
      ASSIGN_OR_RETURN(std::shared_ptr<DifferenceChunk> chunk, memory_.acquire(nbytes));
      chunks_.push_back(std::move(chunk));
    }
    DifferenceChunk& chunk = *chunks_.back();
    std::byte* const to = chunk.memory.bytes().data() + chunk.filled_nbytes;
    std::memcpy(to, comparison_.streams(), static_cast<size_t>(nbytes));
    block.streams = to;
    chunk.filled_nbytes += nbytes;
    return ok_status();
  }

  const LiveTensor& snapshot_;
  const LiveTensor& source_;
  const std::span<uint64_t> digests_;
  DifferenceMemory& memory_;
  BlockComparison comparison_;
  std::vector<std::byte> packed_;
  std::vector<std::shared_ptr<DifferenceChunk>> chunks_;
};

Status BoxDifference::encode_run(std::span<const Block> blocks, EncodedDifference& out) {
  out.table.resize(blocks.size() * kBlockRowNbytes);
  std::byte* row = out.table.data();
  for (const Block& block : blocks) {
    const auto begin = static_cast<int64_t>(out.payload.size());
    RETURN_IF_ERROR(encode_block(block.raw, block.streams, out.payload));
    const auto nbytes = static_cast<int64_t>(out.payload.size()) - begin;
    const uint64_t check = nbytes == 0 ? 0 : xxh3(slice(Bytes(out.payload), begin, nbytes));
    store_block_row(row, {block.base, block.result, static_cast<uint32_t>(nbytes),
                          static_cast<uint32_t>(check)});
    row += kBlockRowNbytes;
  }
  return ok_status();
}

Result<EncodedDifference> BoxDifference::encode(int threads) {
  RETURN_IF_ERROR(zstd_available());
  if (is_encoded_) return invalid_argument("this difference is encoded already");
  const auto runs = static_cast<size_t>((std::ssize(blocks_) + kRunBlocks - 1) / kRunBlocks);
  std::vector<EncodedDifference> of_runs(runs);
  std::vector<Status> statuses(runs);
  parallel_for(std::ssize(of_runs), threads, [&](int64_t i) {
    statuses[static_cast<size_t>(i)] =
        encode_run(run_of(std::span(blocks_), i), of_runs[static_cast<size_t>(i)]);
  });
  is_encoded_ = true;
  chunks_ = {};
  blocks_ = {};
  for (const Status& status : statuses) RETURN_IF_ERROR(status);
  EncodedDifference all;
  for (const EncodedDifference& run : of_runs) {
    all.payload.insert(all.payload.end(), run.payload.begin(), run.payload.end());
    all.table.insert(all.table.end(), run.table.begin(), run.table.end());
  }
  return all;
}

Result<BoxDifference> take_difference(const LiveTensor& snapshot, const LiveTensor& source,
                                      int64_t first_block, int64_t end_block,
                                      std::span<uint64_t> digests, int threads,
                                      const std::shared_ptr<DifferenceMemory>& memory) {
  RETURN_IF_ERROR(check(snapshot, source, digests));
  const int64_t blocks = end_block - first_block;
  if (!range_within(first_block, blocks, std::ssize(digests))) {
    return invalid_argument("there are no blocks [", first_block, ", ", end_block, ") among ",
                            digests.size());
  }
  BoxDifference difference;
  difference.blocks_.resize(static_cast<size_t>(blocks));
  const int64_t runs = (blocks + kRunBlocks - 1) / kRunBlocks;
  std::atomic<int64_t> next = 0;
  std::mutex mutex;
  Status status;
  parallel_for(std::min<int64_t>(threads, runs), threads, [&](int64_t) {
    BoxDifference::Taking taking(snapshot, source, digests, *memory);
    Status own;
    for (int64_t i = next++; i < runs && own.ok(); i = next++) {
      own = taking.take(first_block + i * kRunBlocks, run_of(std::span(difference.blocks_), i));
    }
    const std::lock_guard lock(mutex);
    if (!own.ok()) status = own;
    std::ranges::move(taking.finish(), std::back_inserter(difference.chunks_));
  });
  RETURN_IF_ERROR(status);
  return difference;
}

Status take_snapshot(const LiveTensor& snapshot, const LiveTensor& source,
                     std::span<uint64_t> digests, int threads) {
  RETURN_IF_ERROR(check(snapshot, source, digests));
  const int64_t blocks = std::ssize(digests);
  parallel_for((blocks + kRunBlocks - 1) / kRunBlocks, threads, [&](int64_t i) {
    std::vector<std::byte> packed;
    const int64_t end = std::min((i + 1) * kRunBlocks, blocks);
    for (int64_t block = i * kRunBlocks; block < end; ++block) {
      const Bytes values = packed_block(source, block, packed);
      std::memcpy(block_of(snapshot, block).data(), values.data(), values.size());
      digests[static_cast<size_t>(block)] = xxh3(values);
    }
  });
  return ok_status();
}

}  // namespace torch_ckpt
