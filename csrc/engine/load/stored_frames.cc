#include "engine/load/stored_frames.h"

#include <algorithm>
#include <vector>

namespace torch_ckpt {
namespace {

// The first read of a head has this length. A longer head is read again, up to kMaxHeadNbytes.
constexpr int64_t kFirstHeadNbytes = 4096;
constexpr int64_t kMaxHeadNbytes = int64_t{1} << 20;

// Bounds the number of unparsed frames in memory.
constexpr size_t kFramesAtATime = 1024;

// A frame that is being read.
struct PendingFrame {
  SliceInFile at;
  int64_t head_nbytes = kFirstHeadNbytes;
  std::vector<std::byte> head = {};
  std::vector<std::byte> tail = {};
};

// Reads the head and the tail of every pending frame.
Status read_ends(ReadStream& stream, std::span<PendingFrame> pending) {
  std::vector<WantedRange> wanted;
  for (const PendingFrame& frame : pending) {
    const int64_t begin = frame.at.slice->offset;
    const int64_t end = begin + frame.at.slice->nbytes;
    const std::string* name = &frame.at.slice->name;
    const auto want = [&](int64_t from, int64_t to) {
      wanted.push_back({frame.at.file, {from, to}, nullptr, name, frame.at.sums});
    };
    want(begin, begin + frame.head_nbytes);
    want(end - kFrameTailNbytes, end);
  }
  return stream.run(wanted, [&](int64_t index, Bytes bytes, Unpacking&) {
    PendingFrame& frame = pending[static_cast<size_t>(index / 2)];
    (index % 2 == 0 ? frame.head : frame.tail).assign(bytes.begin(), bytes.end());
    return ok_status();
  });
}

Status read_some_frames(ReadStream& stream, std::vector<PendingFrame> pending, Frames& frames) {
  while (!pending.empty()) {
    RETURN_IF_ERROR(read_ends(stream, pending));
    std::vector<PendingFrame> again;
    for (PendingFrame& frame : pending) {
      const StoredSlice& slice = *frame.at.slice;
      const Result<int64_t> needed = frame_head_nbytes(frame.tail, slice.nbytes);
      const int64_t max_head_nbytes =
          std::min(kMaxHeadNbytes, stream.max_range_nbytes(frame.at.sums));
      if (needed.ok() && *needed > frame.head_nbytes && *needed <= max_head_nbytes) {
        frame.head_nbytes = *needed;
        again.push_back(std::move(frame));
        continue;
      }
      Result<StoredTensor> stored = needed.ok() ? parse_frame(frame.head, frame.tail, slice.nbytes)
                                                : Result<StoredTensor>(needed.status());
      if (stored.ok()) {
        frames[{slice.file, slice.offset}] = std::move(*stored);
      } else if (stored.status().code() != StatusCode::kUnsupported) {
        return with_slice(stored.status(), slice);
      }
    }
    pending = std::move(again);
  }
  return ok_status();
}

}  // namespace

std::string describe(const StoredSlice& slice) {
  if (slice.name.empty()) {
    return str_cat(slice.nbytes, " bytes at ", slice.offset, " of ", slice.file);
  }
  return str_cat("'", slice.name, "' (", slice.nbytes, " bytes at ", slice.offset, " of ",
                 slice.file, ")");
}

Status with_slice(const Status& status, const StoredSlice& slice) {
  return Status(status.code(), str_cat("cannot read ", describe(slice), ": ", status.message()),
                status.error_number());
}

Status check_extent(const StoredSlice& slice, int64_t file_nbytes) {
  if (range_within(slice.offset, slice.nbytes, file_nbytes)) return ok_status();
  return corruption("cannot read ", describe(slice), ": the file is ", file_nbytes, " bytes long");
}

Result<Frames> read_frames(ReadStream& stream, std::span<const SliceInFile> slices) {
  Frames frames;
  std::vector<PendingFrame> pending;
  for (const SliceInFile& at : slices) {
    if (!frames.emplace(std::pair(at.slice->file, at.slice->offset), std::nullopt).second) continue;
    pending.push_back({.at = at});
    if (pending.size() == kFramesAtATime) {
      RETURN_IF_ERROR(read_some_frames(stream, std::move(pending), frames));
      pending.clear();
    }
  }
  RETURN_IF_ERROR(read_some_frames(stream, std::move(pending), frames));
  return frames;
}

}  // namespace torch_ckpt
