#pragma once

// LoadJob: loads tensors and raw slices from the data files of one checkpoint.
//
// A job locates the payloads through the index, or through their frames, which it checks. It then
// reads the wanted byte ranges, coalesced and with many reads in flight, and scatters them to the
// live tensors. A range in the page cache is read through the cache, other ranges with direct I/O.
// An aligned contiguous destination is read in place.
//
// FastReader creates one job per load and calls `run` once for each batch of requests. Up to 128
// files stay open between calls, so that each is opened once.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
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
  int64_t buffer_nbytes = int64_t{64} << 20;  // Memory budget of the buffers of all threads.
  int64_t block_nbytes = int64_t{4} << 20;    // The longest single read through a buffer.
  int threads = 4;
  Caching caching = Caching::kDirect;  // For ranges that are not in the page cache.
  // Whether to verify bytes: by the index's block checksums, or without them by the CRC of each
  // record that is read almost whole, or that `records` require.
  bool verify = true;
  std::shared_ptr<Records> records = nullptr;
  // The data files that this rank reaches. An exchange must supply all bytes of other files, which
  // need an index.
  std::optional<ReachableFiles> reachable = std::nullopt;
  // Tensors that loads see in other dtypes or sizes than stored. They need an index.
  std::shared_ptr<const QuantizedTensors> quantized = nullptr;
};

// Used by one thread at a time, except `cancel`. `run` starts and joins its own threads.
class LoadJob {
 public:
  // `directory` is the checkpoint directory. `index` is its index, or null. Opens no file yet.
  // Errors: kInvalidArgument if `block_nbytes` is too small.
  static Result<std::unique_ptr<LoadJob>> make(FileSystem& fs, std::string directory,
                                               const LoadOptions& options,
                                               std::shared_ptr<const StoredIndex> index = nullptr);
  ~LoadJob();

  // Checks that every slice lies within its file, without reading any.
  // Errors: kNotFound for a missing file; kCorruption for a slice outside its file.
  Status check(std::span<const StoredSlice> slices);

  // Returns the byte ranges that `run` would read for these tensors, with or without memory, and
  // for these raw slices. Errors: those of `run`.
  Result<WantedBytes> wanted(std::span<const TensorRequest> tensors,
                             std::span<const StoredSlice> bytes = {});

  // Returns for each tensor whether `run` would load it or leave it to torch. Without an index, a
  // tensor of up to 128 KiB counts as loaded. Errors: those of `run`.
  Result<std::vector<Outcome>> outcomes(std::span<const TensorRequest> tensors);

  // Loads tensors into their memory, and raw slices into new memory. Passes the elements of each
  // tensor without memory to `hand_over`.
  //
  // With an exchange, other ranks supply the pieces that they read. Requires: every rank of the
  // exchange runs all of its pieces.
  //
  // With `slices_are_archives`, every raw slice must be a torch.save archive. Otherwise a raw slice
  // may have any content, and only torch.save archives are verified.
  //
  // Files, extents and the frames of large tensors are checked first, for up to 128 files at a
  // time. An error of these checks leaves the live tensors of these files unchanged. After a later
  // error, the contents of the live tensors are unspecified.
  // Errors: kNotFound for a missing file; kCorruption for a slice outside its file, a damaged frame
  // or a wrong checksum; kMismatch for a box outside the stored tensor; kStorage.
  Result<LoadResult> run(std::span<const TensorRequest> tensors, std::span<const StoredSlice> bytes,
                         const HandOver& hand_over = {}, ExchangeStream* exchange = nullptr,
                         bool slices_are_archives = false);

  // Makes the current and every later run or plan fail with kCancelled, before its next read. Any
  // thread may call it.
  void cancel();

  // Returns the dtype in which a target of dtype `target` gets a tensor: `stored`, unless it is
  // quantised.
  DType given(const std::string& fqn, DType stored, std::optional<DType> target) const;

  // Number of bytes that all runs have loaded so far. Any thread may call it.
  int64_t loaded_nbytes() const;

  // Requests of all runs, except those of an exchange; see `ReadStream::waited_s`. Any thread may
  // call them.
  int64_t requests() const;
  double waited_s() const;

 private:
  struct State;
  explicit LoadJob(std::unique_ptr<State> state);
  Result<std::map<int64_t, Dequantization>> dequantizations(
      std::span<const TensorRequest> tensors) const;
  Status read_scales(std::span<const TensorRequest> tensors, const std::vector<int64_t>& batch,
                     std::map<int64_t, Dequantization>& dequantized);
  Result<std::vector<TensorRequest>> cut_by_scales(std::span<const TensorRequest> tensors) const;
  Status run_batches(std::span<const TensorRequest> tensors, std::span<const StoredSlice> bytes,
                     const HandOver& hand_over, ExchangeStream* exchange, bool slices_are_archives,
                     WantedBytes* only_wanted, LoadResult* result);
  std::unique_ptr<State> state_;
};

}  // namespace torch_ckpt
