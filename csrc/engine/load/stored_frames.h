#pragma once

// Slices as the metadata describes them, and the frames of stored tensors, read from data files.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"
#include "engine/read_stream.h"
#include "engine/stored_slice.h"
#include "format/zip_frame.h"
#include "io/file_system.h"

namespace torch_ckpt {

// Formats a slice as "'model.w' (4096 bytes at 128 of __0_0.distcp)"; without a name as
// "4096 bytes at 128 of __0_0.distcp".
std::string describe(const StoredSlice& slice);

// Prefixes the message of a status with "cannot read <slice>: ".
Status with_slice(const Status& status, const StoredSlice& slice);

// Errors: kCorruption if the slice does not lie within a file of `file_nbytes` bytes.
Status check_extent(const StoredSlice& slice, int64_t file_nbytes);

// A slice of an open file.
struct SliceInFile {
  const StoredSlice* slice;
  File* file;
  const FileSums* sums = nullptr;  // Block checksums of the file; nullptr skips verification.
};

// Frames by file and slice offset; nullopt for a tensor that only torch can read.
using Frames = std::map<std::pair<std::string, int64_t>, std::optional<StoredTensor>>;

// Reads and checks the frames of slices. Reads a slice that is listed several times once.
// Requires: each slice lies within its file and is longer than two blocks of 4096 bytes.
// Errors: kCorruption for a damaged frame; kStorage.
Result<Frames> read_frames(ReadStream& stream, std::span<const SliceInFile> slices);

}  // namespace torch_ckpt
