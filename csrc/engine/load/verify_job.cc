#include "engine/load/verify_job.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "engine/read_stream.h"
#include "format/zip_frame.h"

namespace torch_ckpt {
namespace {

std::vector<ByteRange> joined(std::vector<ByteRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  std::vector<ByteRange> out;
  for (const ByteRange& range : ranges) {
    if (!out.empty() && out.back().end >= range.begin) {
      out.back().end = std::max(out.back().end, range.end);
    } else {
      out.push_back(range);
    }
  }
  return out;
}

}  // namespace

VerifyJob::VerifyJob(FileSystem& fs, std::string directory,
                     std::shared_ptr<const StoredIndex> index, const LoadOptions& options,
                     std::unique_ptr<ReadStream> stream)
    : fs_(fs),
      directory_(std::move(directory)),
      index_(std::move(index)),
      options_(options),
      stream_(std::move(stream)) {}

Result<std::unique_ptr<VerifyJob>> VerifyJob::make(FileSystem& fs, std::string directory,
                                                   std::shared_ptr<const StoredIndex> index,
                                                   const LoadOptions& options) {
  ASSIGN_OR_RETURN(auto stream, ReadStream::make(fs, options.buffer_nbytes, options.block_nbytes,
                                                 options.threads));
  if (options.block_nbytes < 4 * index->block_nbytes()) {
    return invalid_argument("cannot check blocks of ", index->block_nbytes(),
                            " bytes in buffers of ", options.block_nbytes);
  }
  return std::unique_ptr<VerifyJob>(
      new VerifyJob(fs, std::move(directory), std::move(index), options, std::move(stream)));
}

Result<std::vector<ByteRange>> VerifyJob::check(int64_t file, int64_t begin, int64_t end) {
  if (file < 0 || file >= index_->file_count()) {
    return invalid_argument("the index has no file ", file);
  }
  ASSIGN_OR_RETURN(const StoredFile indexed, index_->file(file));
  const FileSums sums(index_, indexed);
  if (!range_within(begin, end - begin, sums.file_nbytes) || begin % sums.block_nbytes != 0) {
    return invalid_argument("cannot check [", begin, ", ", end, ") of ", indexed.name);
  }
  ASSIGN_OR_RETURN(const auto opened,
                   fs_.open(directory_ + "/" + indexed.name, OpenMode::kRead, options_.caching));
  ASSIGN_OR_RETURN(const int64_t nbytes, opened->size());

  std::mutex mutex;
  std::vector<ByteRange> damaged;
  if (end == sums.file_nbytes && nbytes > end) damaged.push_back({end, nbytes});
  const int64_t until = std::min(sums.block_end(end), align_down(nbytes, sums.block_nbytes));
  // The last block is readable only if the file has its full length.
  const int64_t readable = nbytes >= sums.block_end(end) ? sums.block_end(end) : until;
  if (readable < end) damaged.push_back({std::max(begin, readable), end});

  std::vector<WantedRange> wanted;
  const int64_t step = stream_->max_aligned_range_nbytes(&sums);
  for (int64_t from = begin; from < readable; from += step) {
    wanted.push_back({opened.get(), {from, std::min(from + step, readable)}});
  }
  RETURN_IF_ERROR(stream_->run(wanted, [&](int64_t i, Bytes bytes, Unpacking&) {
    const int64_t from = wanted[static_cast<size_t>(i)].range.begin;
    for (int64_t at = 0; at < ssize(bytes);) {
      ASSIGN_OR_RETURN(const int64_t mismatch,
                       sums.first_mismatch(from + at, bytes.subspan(static_cast<size_t>(at))));
      if (mismatch < 0) break;
      const ByteRange range = {mismatch, sums.block_end(mismatch + 1)};
      const std::lock_guard<std::mutex> lock(mutex);
      damaged.push_back(range);
      at = range.end - from;
    }
    return ok_status();
  }));
  return joined(std::move(damaged));
}

Result<std::vector<int64_t>> VerifyJob::check_digests(int64_t entry) {
  std::vector<int64_t> out;
  ASSIGN_OR_RETURN(const StoredEntry stored, index_->entry(entry));
  const auto dtype = dtype_from_name(stored.facts.dtype);
  if (!index_->has_digests() || !dtype) return out;
  for (int64_t number = 0; number < stored.box_count; ++number) {
    ASSIGN_OR_RETURN(const auto expected, index_->digest(stored, number));
    if (expected.low == kUnknownDigest) continue;
    ASSIGN_OR_RETURN(const auto boxes, index_->boxes(stored, number, number + 1));
    const IndexedBox& box = boxes.front();
    ASSIGN_OR_RETURN(const TensorFrame frame, TensorFrame::make(*dtype, box.sizes));
    ASSIGN_OR_RETURN(const StoredFile file, index_->file(box.file));
    const int64_t begin = box.offset + frame.head_nbytes();
    ASSIGN_OR_RETURN(const Digest128 found,
                     digest_of(file.name, {begin, begin + frame.payload_nbytes()}));
    if (found != Digest128{expected.low, expected.high}) out.push_back(number);
  }
  return out;
}

Result<Digest128> VerifyJob::digest_of(const std::string& file, const ByteRange& payload) {
  ASSIGN_OR_RETURN(const auto opened,
                   fs_.open(directory_ + "/" + file, OpenMode::kRead, Caching::kBuffered));
  DigestStream digest;
  std::vector<std::byte> piece(
      static_cast<size_t>(std::min(payload.end - payload.begin, kDigestPieceNbytes)));
  for (int64_t at = payload.begin; at < payload.end;) {
    const MutableBytes into(piece.data(),
                            std::min(piece.size(), static_cast<size_t>(payload.end - at)));
    RETURN_IF_ERROR(opened->read(at, into));
    digest.update(into);
    at += ssize(into);
  }
  return digest.finish();
}

}  // namespace torch_ckpt
