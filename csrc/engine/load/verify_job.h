#pragma once

// Checks a whole checkpoint against its index, at the speed of the disk. Unlike a load it does not
// stop at the first damage: it says all of it. Run by `torch-ckpt verify`.

#include <memory>
#include <string>
#include <vector>

#include "engine/load/load_job.h"
#include "format/stored_index.h"
#include "geometry/overlap.h"
#include "io/file_system.h"

namespace torch_ckpt {

// Used by one thread at a time; runs threads of its own inside `check`.
class VerifyJob {
 public:
  // Of `options`, those about buffers. Errors: as LoadJob::make.
  static Result<std::unique_ptr<VerifyJob>> make(FileSystem& fs, std::string directory,
                                                 std::shared_ptr<const StoredIndex> index,
                                                 const LoadOptions& options);

  // The damaged parts of [begin, end) of a file, ascending, in whole blocks; neighbours are joined.
  // A file of another length than the index states has what is missing, or too much, as damaged.
  // Requires: `begin` is a multiple of the block length. Errors: kInvalidArgument for a file or
  // range that the index does not have; kNotFound; kStorage.
  Result<std::vector<ByteRange>> check(int64_t file, int64_t begin, int64_t end);

 private:
  VerifyJob(FileSystem& fs, std::string directory, std::shared_ptr<const StoredIndex> index,
            const LoadOptions& options, std::unique_ptr<ReadStream> stream);

  FileSystem& fs_;
  const std::string directory_;
  const std::shared_ptr<const StoredIndex> index_;
  const LoadOptions options_;
  const std::unique_ptr<ReadStream> stream_;
};

}  // namespace torch_ckpt
