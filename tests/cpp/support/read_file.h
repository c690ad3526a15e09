#pragma once

#include <string>
#include <vector>

#include "io/file_system.h"

namespace torch_ckpt {

// All bytes of a small file.
inline Result<std::vector<std::byte>> read_file(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const auto file, fs.open(path, OpenMode::kRead, Caching::kBuffered));
  ASSIGN_OR_RETURN(const int64_t nbytes, file->size());
  std::vector<std::byte> bytes(static_cast<size_t>(nbytes));
  if (nbytes > 0) RETURN_IF_ERROR(file->read(0, bytes));
  return bytes;
}

}  // namespace torch_ckpt
