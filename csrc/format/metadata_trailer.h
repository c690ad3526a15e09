#pragma once

// The trailer behind the pickle in `.metadata` (FORMAT.md): the save id, and the length and
// checksum of the pickle. `pickle.load` stops at the last opcode, so stock DCP ignores the trailer.
// A load by the index reads only the trailer of the file.

#include <array>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "base/xxh3.h"

namespace torch_ckpt {

// Identifies the contents of a file by length and checksum.
struct FileDigest {
  int64_t nbytes = 0;
  uint64_t sum = 0;  // XXH3.

  static FileDigest of(Bytes bytes) { return {ssize(bytes), xxh3(bytes)}; }
  bool operator==(const FileDigest&) const = default;
};

inline constexpr int64_t kSaveIdNbytes = 16;
inline constexpr int64_t kMetadataTrailerNbytes = 64;

// Contents of a trailer. The index of the same save states the same save id and pickle.
struct MetadataTrailer {
  std::string save_id;
  FileDigest pickle;
  uint64_t term = 0;  // Term of the job that committed the file; 0 without a run.

  bool operator==(const MetadataTrailer&) const = default;
};

// Errors: kInvalidArgument if the save id is not kSaveIdNbytes long.
Result<std::array<std::byte, kMetadataTrailerNbytes>> write_metadata_trailer(
    const MetadataTrailer& trailer);

// Decodes the trailer from the last kMetadataTrailerNbytes bytes of a file of `file_nbytes` bytes.
// Errors: kCorruption for a missing or damaged trailer; kUnsupported for a newer version.
Result<MetadataTrailer> parse_metadata_trailer(Bytes last, int64_t file_nbytes);

}  // namespace torch_ckpt
