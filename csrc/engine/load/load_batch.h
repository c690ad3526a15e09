#pragma once

// What a load wants, and one batch of it: the requests whose files are open. LoadJob opens the
// files, a batch at a time; everything between a request and its tensor's bytes happens here.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/exchange/exchange_stream.h"
#include "engine/live_tensor.h"
#include "engine/load/index_lookup.h"
#include "engine/load/stored_frames.h"
#include "engine/load/temporaries.h"
#include "engine/read_stream.h"
#include "geometry/box.h"

namespace torch_ckpt {

// `box` of the stored tensor is wanted in `live`, which has the box's sizes and the stored dtype.
// Where that has no memory (and the strides of a contiguous tensor), the elements are handed over.
struct TensorRequest {
  StoredSlice slice;
  Box box;
  LiveTensor live;
};

enum class Outcome : uint8_t {
  kLoaded,
  kNeedsTorch,  // Sound, but not a plain tensor of the live dtype: nothing was written to `live`.
};

struct LoadResult {
  std::vector<Outcome> outcomes;   // One for each tensor request.
  std::vector<LoadedBytes> bytes;  // One for each slice that was asked for raw, as it is stored.
};

struct OpenFile {
  std::unique_ptr<File> file;
  int64_t nbytes = 0;
  std::unique_ptr<const FileSums> sums = {};  // Where its blocks are to be checked.
};

// What a batch works with. All of it outlives the batch.
struct BatchContext {
  ReadStream& stream;
  const std::map<std::string, OpenFile>& files;
  IndexLookup* index;  // nullptr where there is none that says what is in the slices.
  bool verify;
  bool slices_are_archives;
  std::span<const TensorRequest> tensors;
  std::span<const StoredSlice> bytes;
  const HandOver& hand_over;
  LoadResult& result;
};

// One run over files that are all open. Made, run once and dropped.
class LoadBatch {
 public:
  explicit LoadBatch(const BatchContext& context);

  // Finds out what to read; `tensor_indices` and `byte_indices` are the requests of this batch.
  Status plan(const std::vector<int64_t>& tensor_indices, const std::vector<int64_t>& byte_indices);

  // What is to be read, as planned.
  const std::vector<WantedRange>& wanted() const { return wanted_; }

  // Reads what was planned.
  Status run();

  // Likewise, with what other ranks read of the same files.
  Status run(ExchangeStream& exchange, std::span<const ExchangePiece> pieces);

 private:
  // One cut of a large tensor request.
  struct Piece {
    int64_t request;
    StridedCopy copy;   // Source offsets count from the start of the file.
    bool one_run;       // Whether it is one run of bytes on both sides.
    bool to_be_summed;  // Whether `crc` is asked for.
    uint32_t crc = 0;
  };

  // The pieces [first, last) are the whole payload of a slice, in order.
  struct WholePayload {
    int64_t first;
    int64_t last;
    uint32_t crc;
  };

  Status check_slice(const StoredSlice& slice) const;
  Status find_tensors(const std::vector<int64_t>& requests);
  Status plan_tensor(int64_t request, const std::optional<StoredTensor>& found);
  std::vector<StridedCopy> cut(const StridedCopy& copy, const FileSums* sums) const;
  Status plan_bytes(int64_t request);
  Status verify() const;
  Result<bool> accepts(int64_t request, const StoredTensor& stored);
  Status consume(int64_t index, Bytes bytes, Unpacking& unpacking);
  Status consume_piece(Piece& piece, Bytes bytes, Unpacking& unpacking);
  Status put(int64_t request, const StridedCopy& copy, const std::byte* from, Unpacking& unpacking);
  Result<std::byte*> memory_of(int64_t request);
  Status arrived(int64_t request);
  void expect(int64_t request);
  Status consume_whole_slice(int64_t request, Bytes bytes, Unpacking& unpacking);
  Status verify_payloads() const;
  Status verify_bytes() const;

  const OpenFile& file_of(const StoredSlice& slice) const {
    return files_.find(slice.file)->second;
  }
  // What is to be read of a slice's file.
  WantedRange want(const StoredSlice& slice, const ByteRange& range, std::byte* destination) const {
    const OpenFile& file = file_of(slice);
    return {file.file.get(), range, destination, &slice.name, file.sums.get()};
  }
  WantedRange want(int64_t request, const ByteRange& range, std::byte* destination) const {
    WantedRange out = want(tensor(request).slice, range, destination);
    out.device = tensor(request).live.device;
    return out;
  }
  const TensorRequest& tensor(int64_t request) const {
    return tensors_[static_cast<size_t>(request)];
  }
  // Of what is empty, nothing needs memory.
  bool lacks_memory(int64_t request) const {
    const LiveTensor& live = tensor(request).live;
    return live.data == nullptr && checked_numel(live.sizes).value_or(0) > 0;
  }
  void leave_to_torch(int64_t request) {
    result_.outcomes[static_cast<size_t>(request)] = Outcome::kNeedsTorch;
  }

  ReadStream& stream_;
  const std::map<std::string, OpenFile>& files_;
  IndexLookup* const index_;
  const bool verify_;
  const bool slices_are_archives_;
  std::span<const TensorRequest> tensors_;
  std::span<const StoredSlice> bytes_;
  LoadResult& result_;
  Temporaries temporaries_;
  const int64_t whole_slice_nbytes_;  // Slices up to this long are read whole.

  // What is wanted, in the order of `wanted_`: pieces, then whole slices, then raw bytes.
  std::vector<WantedRange> wanted_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> whole_slices_;  // Requests.
  std::vector<WholePayload> whole_payloads_;
  std::vector<int64_t> byte_indices_;
};

}  // namespace torch_ckpt
