#pragma once

// A checkpoint's `.metadata`: its pickle, and the trailer that says what the pickle must be.
// Opening reads the trailer alone. Used by open_checkpoint; what it opened is then read by those
// who need the pickle, and by `torch-ckpt verify`.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/metadata_trailer.h"
#include "io/file_system.h"

namespace torch_ckpt {

// Stays what it was when another save replaces it. Safe to use from any thread.
class MetadataFile {
 public:
  // Errors: kNotFound; kStorage. A trailer that is missing or damaged is no error here.
  static Result<std::shared_ptr<MetadataFile>> open(FileSystem& fs, const std::string& path);

  const std::string& path() const { return file_->path(); }
  int64_t nbytes() const { return nbytes_; }

  // What follows the pickle; nothing in what stock DCP has written, or where it is damaged.
  const std::optional<MetadataTrailer>& trailer() const { return trailer_; }
  const Status& trailer_status() const { return trailer_status_; }  // Why it is not there.

  // The pickle, without what follows it. Errors: with `verify`, kCorruption for one that fails the
  // trailer's checksum; kStorage.
  Result<std::vector<std::byte>> read_pickle(bool verify = true) const;

  // As `read_pickle`, in little memory. Errors: kCorruption where there is no trailer, too.
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
