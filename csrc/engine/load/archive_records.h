#pragma once

// The records of a file that torch.save has written: where the storages of its tensors lie.
//
// What is in them, only the archive's pickle says, which is Python's to read: torch_ckpt/formats
// brings both together in an index.

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/file_system.h"

namespace torch_ckpt {

struct ArchiveRecord {
  std::string name;    // With the archive's folder: "archive/data/0".
  int64_t offset = 0;  // Of its data, from the start of the file.
  int64_t nbytes = 0;
  uint32_t crc = 0;  // 0 where torch.save was told not to compute it.
};

struct Archive {
  int64_t nbytes = 0;
  std::vector<ArchiveRecord> records;  // In the order of their offsets.
};

// Reads the zip directory at the end of the file, and nothing else.
// Errors: kCorruption for a file that is no archive or whose records cannot be where it says;
// kUnsupported for one that is compressed or encrypted; kNotFound; kStorage.
Result<Archive> read_archive(FileSystem& fs, const std::string& path);

}  // namespace torch_ckpt
