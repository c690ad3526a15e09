#pragma once

// LoadJob: reads what is wanted from the data files of one checkpoint into live tensors.
//
// A job first learns where the payloads lie (from the index, or from the frames, which it checks),
// then reads the wanted byte ranges, coalesced where they are close, with many reads in flight, and
// scatters them into place. A range that the page cache holds is read through it; all else is read
// directly. Aligned contiguous destinations receive reads without a copy between.
//
// FastReader keeps one job for a load and calls `run` once for each batch of requests. Files stay
// open from call to call, up to 128 of them, so that each is opened once.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/load/load_batch.h"
#include "format/stored_index.h"
#include "io/file_system.h"
#include "plan/wanted_bytes.h"

namespace torch_ckpt {

struct LoadOptions {
  int64_t buffer_nbytes = int64_t{64} << 20;  // Budget of buffers, all threads together.
  int64_t block_nbytes = int64_t{4} << 20;    // The longest single read through a buffer.
  int threads = 4;
  Caching caching = Caching::kDirect;  // For what the page cache does not hold.
  // Whether bytes are checked: against the index by blocks, or without one against the CRC of
  // payloads that are read whole.
  bool verify = true;
};

// Used by one thread at a time; runs threads of its own inside `run`.
class LoadJob {
 public:
  // `directory` is the checkpoint's, `index` its own, where it has one. Opens nothing yet.
  // Errors: kInvalidArgument for blocks too short to read through.
  static Result<std::unique_ptr<LoadJob>> make(FileSystem& fs, std::string directory,
                                               const LoadOptions& options,
                                               std::shared_ptr<const StoredIndex> index = nullptr);
  ~LoadJob();

  // Checks that every slice lies in its file, without reading any.
  // Errors: kNotFound for a missing file; kCorruption for a slice that its file does not hold.
  Status check(std::span<const StoredSlice> slices);

  // Which bytes `run` would read for these tensors, whether they have memory or not.
  // Errors: as of `run`.
  Result<WantedBytes> wanted(std::span<const TensorRequest> tensors);

  // Reads tensors into place, and raw slices into memory of their own. A tensor that comes without
  // memory is handed over when it is read. With an exchange, what other ranks read of it is had
  // from them, and all of its pieces are run; every rank of it must. Files, extents and the frames
  // of large tensors are checked before anything is allocated or any `live` written (of more than
  // 128 files: for 128 at a time); after a later error, what the live tensors hold is unspecified.
  // `slices_are_archives` says that every raw slice is an archive as torch.save writes it, so that
  // one which is not is damaged. Otherwise it may be anything, and only what looks like
  // torch.save's is checked. Errors: kNotFound for a missing file; kCorruption for a slice that its
  // file does not hold, a broken frame or a wrong checksum; kMismatch for a box outside the stored
  // tensor; kStorage.
  Result<LoadResult> run(std::span<const TensorRequest> tensors, std::span<const StoredSlice> bytes,
                         const HandOver& hand_over = {}, ExchangeStream* exchange = nullptr,
                         bool slices_are_archives = false);

 private:
  struct State;
  explicit LoadJob(std::unique_ptr<State> state);
  Status run_batches(std::span<const TensorRequest> tensors, std::span<const StoredSlice> bytes,
                     const HandOver& hand_over, ExchangeStream* exchange, bool slices_are_archives,
                     WantedBytes* only_wanted, LoadResult* result);
  std::unique_ptr<State> state_;
};

}  // namespace torch_ckpt
