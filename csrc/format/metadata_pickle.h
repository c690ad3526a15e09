#pragma once

// Writes the pickle in `.metadata`, which is DCP's `Metadata`, from an `Index` and without Python.
// Python needs a few microseconds per box, while all ranks wait for the coordinator.
//
// The result unpickles to the value that Python would have pickled. It is shorter, because equal
// texts, sizes and properties are written once. Called by commit_files. Metadata with values that
// an index cannot represent is pickled in Python instead.

#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "format/index_file.h"

namespace torch_ckpt {

// Fields of DCP's class of the same name. Texts are UTF-8.
struct StorageMeta {
  std::optional<std::string> checkpoint_id = {};
  bool checkpoint_is_path = false;  // Whether checkpoint_id is a pathlib.PosixPath or a str.
  std::optional<std::string> save_id = {};
  std::optional<std::string> load_id = {};
  std::vector<std::string> modules = {};

  bool operator==(const StorageMeta&) const = default;
};

// Pickles the entries, paths and version of an index; an empty version becomes None. As in stock
// DCP, the key of a box in `storage_data` has the box number as its hint. The key of an undivided
// tensor has none.
//
// Requires: the index has entries; all texts are UTF-8.
// Errors: kInvalidArgument for a dtype that is not an identifier, an unknown memory format, an
// object without exactly one box, or a file number out of range. write_index checks the rest.
Result<std::vector<std::byte>> pickle_metadata(const Index& index, const StorageMeta& storage);

}  // namespace torch_ckpt
