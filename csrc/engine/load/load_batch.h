#pragma once

// LoadBatch: plans and executes the requests for a set of open files. Also defines the requests and
// results of a load. LoadJob opens the files of one batch at a time.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/dequantization.h"
#include "engine/exchange/exchange_stream.h"
#include "engine/live_tensor.h"
#include "engine/load/away_file.h"
#include "engine/load/index_lookup.h"
#include "engine/load/records.h"
#include "engine/load/stored_frames.h"
#include "engine/load/temporaries.h"
#include "engine/read_stream.h"
#include "geometry/box.h"

namespace torch_ckpt {

// A request to load `box` of the stored tensor into `live`. Requires: `live` has the sizes of the
// box. If `live` has no memory, it has contiguous strides, and the elements go to HandOver.
struct TensorRequest {
  StoredSlice slice;
  Box box;
  LiveTensor live;
  // The stored tensor, if the caller knows it. The index or the frame is then not read.
  std::optional<StoredTensor> stored = {};
};

enum class Outcome : uint8_t {
  kLoaded,
  kNeedsTorch,  // Valid, but not a plain tensor of the live dtype. `live` is unchanged.
};

struct LoadResult {
  std::vector<Outcome> outcomes;   // One per tensor request.
  std::vector<LoadedBytes> bytes;  // One per raw slice request, with the stored bytes.
};

struct OpenFile {
  std::unique_ptr<File> file;
  int64_t nbytes = 0;
  std::unique_ptr<const FileSums> sums = {};  // Block checksums; null skips verification.
  const AwayFile* away = nullptr;             // `file`, if this rank does not reach it.
};

// The inputs of a batch. All of them outlive the batch.
struct BatchContext {
  ReadStream& stream;
  const std::map<std::string, OpenFile>& files;
  IndexLookup* index;                 // nullptr if there is no index that describes the slices.
  Records* records;                   // nullptr if no record is known, and none must be checked.
  const QuantizedTensors* quantized;  // nullptr if no tensor is quantised.
  const std::map<int64_t, Dequantization>& dequantized;  // By request, with its scales.
  bool verify;
  bool slices_are_archives;
  std::span<const TensorRequest> tensors;
  std::span<const StoredSlice> bytes;
  const HandOver& hand_over;
  LoadResult& result;
  std::atomic<int64_t>& loaded_nbytes;  // Counts the bytes that reached their destinations.
};

// The requests of one set of open files. Planned once and run once.
class LoadBatch {
 public:
  explicit LoadBatch(const BatchContext& context);

  // Plans the ranges to read. `tensor_indices` and `byte_indices` are the requests of this batch.
  Status plan(const std::vector<int64_t>& tensor_indices, const std::vector<int64_t>& byte_indices);

  // The planned ranges.
  const std::vector<WantedRange>& wanted() const { return wanted_; }

  // Reads the planned ranges.
  Status run();

  // Reads the planned ranges, and obtains `pieces` of them through the exchange.
  Status run(ExchangeStream& exchange, std::span<const ExchangePiece> pieces);

 private:
  // A part of a record whose CRC is computed: a piece, or a gap, which is read for that alone.
  struct RecordPart {
    bool is_gap;
    int64_t index;  // An index of `pieces_`, or of `gap_crcs_`.
    int64_t nbytes;
  };

  // A piece of a large tensor request.
  struct Piece {
    int64_t request;
    StridedCopy copy;   // Source offsets count from the start of the file.
    bool one_run;       // Whether source and destination are each one run of bytes.
    bool to_be_summed;  // Whether to compute `crc`.
    uint32_t crc = 0;
    Box numbers = {};  // The numbers that a dequantised request reads.
  };

  // A record, and the pieces that lie in it. If it is checked, the parts cover it in order.
  struct TouchedRecord {
    StoredRecord record;
    std::vector<int64_t> pieces;
    std::vector<RecordPart> parts;
  };

  Status check_slice(const StoredSlice& slice) const;
  Status check_reach(std::span<const WantedRange> wanted) const;
  Status find_tensors(const std::vector<int64_t>& requests);
  std::optional<StoredTensor> known(int64_t request) const;
  Status plan_tensor(int64_t request, const std::optional<StoredTensor>& found);
  void plan_dequantized(int64_t request, const Dequantization& dequantization);
  std::vector<StridedCopy> cut(const StridedCopy& copy, const FileSums* sums) const;
  Status plan_bytes(int64_t request);
  void touch_record(const StoredSlice& slice, const StoredTensor& stored, int64_t piece);
  void plan_records();
  void plan_record(const std::string& file, TouchedRecord& touched);
  Status verify() const;
  Result<bool> accepts(int64_t request, const StoredTensor& stored);
  Status consume(int64_t index, Bytes bytes, Unpacking& unpacking);
  Status consume_piece(Piece& piece, Bytes bytes, Unpacking& unpacking);
  Status put(int64_t request, const StridedCopy& copy, const std::byte* from, Unpacking& unpacking);
  Result<std::byte*> memory_of(int64_t request);
  Status arrived(int64_t request);
  void expect(int64_t request);
  Status consume_whole_slice(int64_t request, Bytes bytes, Unpacking& unpacking);
  Status verify_records() const;
  Status verify_bytes() const;

  const OpenFile& file_of(const StoredSlice& slice) const {
    return files_.find(slice.file)->second;
  }
  // Makes the wanted range for a range of a slice's file.
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
  // An empty tensor needs no memory.
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
  Records* const records_;
  const QuantizedTensors* const quantized_;
  const std::map<int64_t, Dequantization>& dequantized_;
  const bool verify_;
  const bool slices_are_archives_;
  std::span<const TensorRequest> tensors_;
  std::span<const StoredSlice> bytes_;
  LoadResult& result_;
  std::atomic<int64_t>& loaded_nbytes_;
  Temporaries temporaries_;
  const int64_t whole_slice_nbytes_;  // Slices up to this length are read whole.

  // `wanted_` has the ranges of pieces first, then those of whole slices, then those of raw bytes,
  // then the gaps of records.
  std::vector<WantedRange> wanted_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> whole_slices_;                                 // Indices of requests.
  std::map<std::pair<std::string, int64_t>, TouchedRecord> touched_;  // By file and begin.
  std::vector<uint32_t> gap_crcs_;
  std::vector<int64_t> byte_indices_;
};

}  // namespace torch_ckpt
