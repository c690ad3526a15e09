#pragma once

// Slices as metadata names them, and the frames around stored tensors, read from their files.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"
#include "engine/read_stream.h"
#include "format/zip_frame.h"
#include "io/file_system.h"

namespace torch_ckpt {

// One slice of a data file; `name` is the FQN it belongs to, for messages.
struct StoredSlice {
  std::string file;  // Relative to the checkpoint's directory.
  int64_t offset = 0;
  int64_t nbytes = 0;
  std::string name;
};

// "'model.w' (4096 bytes at 128 of __0_0.distcp)"
std::string describe(const StoredSlice& slice);

// The status with "cannot read <slice>: " before its message.
Status with_slice(const Status& status, const StoredSlice& slice);

// Errors: kCorruption where the slice does not lie in a file of `file_nbytes` bytes.
Status check_extent(const StoredSlice& slice, int64_t file_nbytes);

// A slice in a file that is open.
struct SliceInFile {
  const StoredSlice* slice;
  File* file;
  const FileSums* sums = nullptr;  // Of the file, where it is to be checked.
};

// Frames by file and offset of their slice; nothing for what only torch can read.
using Frames = std::map<std::pair<std::string, int64_t>, std::optional<StoredTensor>>;

// Reads and checks the frames of slices, of which each is longer than two blocks of 4096 bytes and
// lies within its file. A slice that is named several times is read once.
// Errors: kCorruption for a broken frame; kStorage.
Result<Frames> read_frames(ReadStream& stream, std::span<const SliceInFile> slices);

}  // namespace torch_ckpt
