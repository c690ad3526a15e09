#pragma once

// `.index` as a value: what `.metadata` says, in a form that is read without unpickling anything,
// and checksums of every block of every data file (FORMAT.md states every byte).
//
// The writer of a checkpoint builds an `Index` and publishes its bytes with `.metadata`
// (engine/commit). Readers look up in the file what they want (stored_index.h); tests and fuzz
// targets have all of it parsed into a value again.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/block_sums.h"
#include "base/bytes.h"
#include "base/state_path.h"
#include "base/status.h"
#include "base/strided.h"
#include "format/metadata_trailer.h"

namespace torch_ckpt {

struct IndexedFile {
  std::string name;  // In the checkpoint's directory itself.
  BlockSums sums = {};

  bool operator==(const IndexedFile&) const = default;
};

// One stored box of a tensor, or the one slice of an object.
struct IndexedBox {
  Dims offsets = {};
  Dims sizes = {};
  int64_t file = 0;  // In Index::files.
  int64_t offset = 0;
  int64_t nbytes = 0;
  // Whether the slice is a frame of ours (zip_frame.h) around the box's elements in the tensor's
  // dtype, or in a foreign index these elements themselves; otherwise only torch can read it.
  bool plain = false;
  // Stream transforms that were applied, in DCP's names.
  std::vector<std::string> transforms = {};

  bool operator==(const IndexedBox&) const = default;
};

// Where the elements of a tensor lie in an extent that may hold more than them.
struct IndexedView {
  Dims strides = {};           // In elements.
  int64_t storage_offset = 0;  // In elements.
  uint32_t crc = 0;            // CRC-32 of the whole extent; 0 where it is not known.

  bool operator==(const IndexedView&) const = default;
};

// One FQN. Words are torch's: a dtype is "bfloat16", a memory format "contiguous_format".
struct IndexedEntry {
  std::string fqn;
  bool is_tensor = false;  // Otherwise an object, with one box of no dimensions.
  std::string dtype = {};
  std::string memory_format = {};
  bool requires_grad = false;
  bool pin_memory = false;
  Dims sizes = {};
  std::vector<IndexedBox> boxes = {};
  // Of the only box of a tensor in a foreign index; otherwise elements are in row-major order.
  std::optional<IndexedView> view = {};

  bool operator==(const IndexedEntry&) const = default;
};

using IndexedPath = StatePath;

struct Index {
  std::string save_id;
  FileDigest metadata = {};  // Of the pickle in the `.metadata` that this index belongs to.
  std::vector<IndexedFile> files = {};

  // Whether what follows is there. It is not where a planner has put something into `.metadata`
  // that has no form here; then that alone says what is stored.
  bool has_entries = false;
  std::string version = {};                // Metadata.version.
  std::vector<IndexedEntry> entries = {};  // In the order of Metadata.state_dict_metadata.
  bool has_paths = false;                  // Whether Metadata.planner_data is a dict of paths.
  std::vector<IndexedPath> paths = {};

  // Whether the files are of another format: they have no sums, and extents may share bytes. Such
  // an index is used where it was made, and never published.
  bool is_foreign = false;

  bool operator==(const Index&) const = default;
};

// Errors: kInvalidArgument for an index that parse_index would refuse.
Result<std::vector<std::byte>> write_index(const Index& index);

// All of an index. What it returns is sound: every number has been checked against the others.
// Errors: kCorruption for bytes that write_index did not write; kUnsupported for a newer version.
Result<Index> parse_index(Bytes bytes);

}  // namespace torch_ckpt
