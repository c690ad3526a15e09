#pragma once

// The pickle in `.metadata`: DCP's `Metadata`, made without Python from what an index says.
//
// It unpickles to what stock DCP's planner and our writer would have pickled, and is shorter: equal
// texts, sizes and properties are written once. Called by `sealed_metadata`, as Python takes a few
// microseconds for each box; a planner's metadata that have no form in an index are pickled there.

#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "format/index_file.h"

namespace torch_ckpt {

// DCP's class of this name. Texts are UTF-8.
struct StorageMeta {
  std::optional<std::string> checkpoint_id = {};
  bool checkpoint_is_path = false;  // A pathlib.PosixPath, not a str.
  std::optional<std::string> save_id = {};
  std::optional<std::string> load_id = {};
  std::vector<std::string> modules = {};

  bool operator==(const StorageMeta&) const = default;
};

// `Metadata` of the index's entries, paths and version ("" is None). Keys of `storage_data` have
// the number of the chunk as a hint, as stock's planner gives it; those of a tensor in one piece
// have none.
//
// Requires: the index has entries; all texts in it are UTF-8. Of what write_index checks, only what
// the pickle could not be written without is checked.
// Errors: kInvalidArgument for entries that have no such form: a dtype that is no name, an unknown
// memory format, an object without its one box, a file that is not there.
Result<std::vector<std::byte>> pickle_metadata(const Index& index, const StorageMeta& storage);

}  // namespace torch_ckpt
