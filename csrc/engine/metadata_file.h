#pragma once

// MetadataFile: a checkpoint's `.metadata`, which consists of a pickle and a trailer. The trailer
// states the length and checksum of the pickle. Opening reads only the trailer. open_checkpoint
// opens the file; loads and `torch-ckpt verify` read the pickle.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/metadata_trailer.h"
#include "io/file_system.h"

namespace torch_ckpt {

// The contents stay the same when another save replaces the file. Safe to use from any thread.
class MetadataFile {
 public:
  // Errors: kNotFound; kStorage. A missing or damaged trailer is not an error here.
  static Result<std::shared_ptr<MetadataFile>> open(FileSystem& fs, const std::string& path);

  const std::string& path() const { return file_->path(); }
  int64_t nbytes() const { return nbytes_; }

  // The trailer; nullopt if stock DCP wrote the file or the trailer is damaged.
  const std::optional<MetadataTrailer>& trailer() const { return trailer_; }
  const Status& trailer_status() const { return trailer_status_; }  // Why the trailer is absent.

  // Reads the pickle, without the trailer unless this is damaged. A pickle states its own end,
  // which unpicklers stop at. Errors: kCorruption if the file is implausibly long, or if `verify`
  // is set and the pickle fails the trailer's checksum; kStorage.
  Result<std::vector<std::byte>> read_pickle(bool verify = true) const;

  // Verifies the checksum of the pickle in bounded memory. Errors: kCorruption if the checksum does
  // not match or there is no trailer; kStorage.
  Status check_pickle() const;

 private:
  explicit MetadataFile(std::unique_ptr<File> file) : file_(std::move(file)) {}
  Status wrong_sum() const;

  const std::unique_ptr<File> file_;
  int64_t nbytes_ = 0;
  std::optional<MetadataTrailer> trailer_;
  Status trailer_status_;
};

}  // namespace torch_ckpt
