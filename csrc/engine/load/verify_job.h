#pragma once

// VerifyJob: checks the data files of a checkpoint against its index. Unlike a load, it does not
// stop at the first damaged block, but reports all of them. Used by `torch-ckpt verify`.

#include <memory>
#include <string>
#include <vector>

#include "engine/load/load_job.h"
#include "engine/value_digest.h"
#include "format/stored_index.h"
#include "geometry/overlap.h"
#include "io/file_system.h"

namespace torch_ckpt {

// Used by one thread at a time; `check` starts further threads.
class VerifyJob {
 public:
  // Uses the buffer, thread and caching options. Errors: those of LoadJob::make.
  static Result<std::unique_ptr<VerifyJob>> make(FileSystem& fs, std::string directory,
                                                 std::shared_ptr<const StoredIndex> index,
                                                 const LoadOptions& options);

  // Returns the damaged ranges in [begin, end) of a file, ascending, as whole blocks. Adjacent
  // ranges are merged. If the file's length differs from the index, missing or surplus bytes count
  // as damaged. Requires: `begin` is a multiple of the block length. Errors: kInvalidArgument for a
  // file or range outside the index; kNotFound; kStorage.
  Result<std::vector<ByteRange>> check(int64_t file, int64_t begin, int64_t end);

  // Returns the numbers of the boxes of an entry whose elements do not have the digest in the
  // index. Requires: the entry exists. Errors: those of `check`.
  Result<std::vector<int64_t>> check_digests(int64_t entry);

 private:
  VerifyJob(FileSystem& fs, std::string directory, std::shared_ptr<const StoredIndex> index,
            const LoadOptions& options, std::unique_ptr<ReadStream> stream);

  Result<Digest128> digest_of(const std::string& file, const ByteRange& payload);

  FileSystem& fs_;
  const std::string directory_;
  const std::shared_ptr<const StoredIndex> index_;
  const LoadOptions options_;
  const std::unique_ptr<ReadStream> stream_;
};

}  // namespace torch_ckpt
