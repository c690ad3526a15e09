#pragma once

// AwayFile: stands for a data file that this rank does not reach. Only an exchange supplies its
// bytes. LoadJob opens one, and LoadBatch refuses to read it.

#include <cstdint>
#include <string>
#include <utility>

#include "io/file_system.h"

namespace torch_ckpt {

class AwayFile : public File {
 public:
  AwayFile(std::string path, int64_t nbytes) : path_(std::move(path)), nbytes_(nbytes) {}

  const std::string& path() const override { return path_; }
  Result<int64_t> size() const override { return nbytes_; }
  int64_t alignment() const override { return 1; }
  const std::string& fallback_reason() const override { return path_; }
  bool is_resident(int64_t, int64_t) const override { return false; }
  Status read(int64_t, MutableBytes) override { return refusal(); }
  Status write(int64_t, Bytes) override { return refusal(); }
  Status preallocate(int64_t) override { return refusal(); }
  Status truncate(int64_t) override { return refusal(); }

  Status refusal() const {
    return Status(StatusCode::kNotFound, str_cat("this rank cannot reach ", path_,
                                                 ", and no other rank has sent its bytes"));
  }

 private:
  const std::string path_;
  const int64_t nbytes_;
};

}  // namespace torch_ckpt
