#pragma once

// Reads the records of a torch.save archive, which contain the storages of its tensors.
//
// The archive's pickle maps tensors to storages. Python code reads the pickle, and
// torch_ckpt/formats combines both in an index.

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/file_system.h"

namespace torch_ckpt {

struct ArchiveRecord {
  std::string name;    // Includes the archive's folder: "archive/data/0".
  int64_t offset = 0;  // Byte offset of the data in the file.
  int64_t nbytes = 0;
  uint32_t crc = 0;  // 0 if torch.save was configured not to compute it.
};

struct Archive {
  int64_t nbytes = 0;
  std::vector<ArchiveRecord> records;  // Ascending by offset.
};

// Reads only the zip directory at the end of the file.
// Errors: kCorruption if the file is not an archive or its record offsets are impossible;
// kUnsupported if a record is compressed or encrypted; kNotFound; kStorage.
Result<Archive> read_archive(FileSystem& fs, const std::string& path);

}  // namespace torch_ckpt
