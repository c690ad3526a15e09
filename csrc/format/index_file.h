#pragma once

// Index: the contents of an index file as a value. It has the facts of `.metadata`, which readers
// then use without unpickling, and a checksum per block of every data file. FORMAT.md states every
// byte.
//
// The coordinator of a save builds an `Index` and publishes its bytes with `.metadata`
// (engine/commit). Loads query the file in place (stored_index.h). Tests and fuzz targets parse the
// whole file back into an `Index`.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/block_sums.h"
#include "base/bytes.h"
#include "base/state_path.h"
#include "base/status.h"
#include "base/strided.h"
#include "format/index_records.h"
#include "format/metadata_trailer.h"

namespace torch_ckpt {

struct IndexedFile {
  std::string name;  // File name in the checkpoint directory, without folders.
  BlockSums sums = {};
  index_records::Origin origin = 0;

  bool operator==(const IndexedFile&) const = default;
};

// One stored box of a tensor, or the slice of an object.
struct IndexedBox {
  Dims offsets = {};
  Dims sizes = {};
  int64_t file = 0;    // Position in Index::files.
  int64_t offset = 0;  // Byte offset of the slice in the file.
  int64_t nbytes = 0;  // Length of the slice.
  // If true, the slice is a TensorFrame (zip_frame.h) with the elements of the box in the tensor's
  // dtype; in a foreign index, the slice is the elements alone. If false, only torch can read it.
  bool plain = false;
  // Names of the DCP stream transforms that were applied to the slice.
  std::vector<std::string> transforms = {};
  index_records::Digest digest = {};  // Zeros if unknown.

  bool operator==(const IndexedBox&) const = default;
};

// The view of a tensor on its extent, which may contain other elements, too.
struct IndexedView {
  Dims strides = {};           // In elements.
  int64_t storage_offset = 0;  // In elements.
  uint32_t crc = 0;            // CRC-32 of the whole extent, or 0 if unknown.

  bool operator==(const IndexedView&) const = default;
};

// One FQN. Dtypes and memory formats have torch's names: "bfloat16", "contiguous_format".
struct IndexedEntry {
  std::string fqn;
  bool is_tensor = false;  // False for an object, which has one box without dimensions.
  std::string dtype = {};
  std::string memory_format = {};
  bool requires_grad = false;
  bool pin_memory = false;
  Dims sizes = {};
  std::vector<IndexedBox> boxes = {};
  // View on the only box of the tensor, in a foreign index. Without a view, the elements of a box
  // are in row-major order.
  std::optional<IndexedView> view = {};

  bool operator==(const IndexedEntry&) const = default;
};

using IndexedPath = StatePath;

struct Index {
  std::string save_id;  // Part of the names of files: 16 hexadecimal digits.
  // StorageMeta.save_id of the metadata; empty if it equals `save_id`.
  std::string stored_save_id = {};
  FileDigest metadata = {};  // Digest of the pickle in the `.metadata` that the index belongs to.
  std::vector<IndexedFile> files = {};

  // Whether the index describes the entries. It does not if a planner stored values in `.metadata`
  // that the index cannot represent. Readers then use `.metadata` instead.
  bool has_entries = false;
  std::string version = {};                // Metadata.version.
  std::vector<IndexedEntry> entries = {};  // In the order of Metadata.state_dict_metadata.
  bool has_paths = false;                  // Whether Metadata.planner_data is a dict of paths.
  std::vector<IndexedPath> paths = {};     // Metadata.planner_data.

  // Whether the index describes files of another format. Such files have no block sums, and their
  // extents may share bytes. A foreign index exists only in memory and is never published.
  bool is_foreign = false;

  // index_records::kWriterRevision of the code that wrote the data files.
  uint32_t writer_revision = index_records::kWriterRevision;

  bool operator==(const Index&) const = default;
};

// Encodes an index. Errors: kInvalidArgument for an index that parse_index would reject.
Result<std::vector<std::byte>> write_index(const Index& index);

// Decodes a whole index and checks the consistency of all records.
// Errors: kCorruption for bytes that write_index did not write; kUnsupported for a newer version.
Result<Index> parse_index(Bytes bytes);

}  // namespace torch_ckpt
