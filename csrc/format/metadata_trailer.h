#pragma once

// What follows the pickle in `.metadata` (FORMAT.md): who wrote it, how long the pickle is and its
// checksum. A pickle ends at its last opcode and `pickle.load` looks no further, so stock DCP does
// not see it; and a reader that has an index needs no more of the file than this.

#include <array>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "base/xxh3.h"

namespace torch_ckpt {

// What tells one state of a file from any other.
struct FileDigest {
  int64_t nbytes = 0;
  uint64_t sum = 0;  // XXH3.

  static FileDigest of(Bytes bytes) { return {ssize(bytes), xxh3(bytes)}; }
  bool operator==(const FileDigest&) const = default;
};

inline constexpr int64_t kSaveIdNbytes = 16;
inline constexpr int64_t kMetadataTrailerNbytes = 64;

// What a trailer says, and the index that was committed with it.
struct MetadataTrailer {
  std::string save_id;
  FileDigest pickle;

  bool operator==(const MetadataTrailer&) const = default;
};

// Errors: kInvalidArgument for a save id that is not kSaveIdNbytes long.
Result<std::array<std::byte, kMetadataTrailerNbytes>> write_metadata_trailer(
    const MetadataTrailer& trailer);

// Reads the trailer of a file of `file_nbytes` bytes from its last kMetadataTrailerNbytes.
// Errors: kCorruption where it has none, or one that is damaged; kUnsupported for a newer version.
Result<MetadataTrailer> parse_metadata_trailer(Bytes last, int64_t file_nbytes);

// How much of a file is pickle, although its trailer may be damaged. All, where nothing shows that
// it has one.
int64_t pickle_nbytes(Bytes file);

}  // namespace torch_ckpt
