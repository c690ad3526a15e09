#pragma once

// Finds what a save need not write, because an older checkpoint has the same bytes: its *base*.
//
// A box is unchanged if the base has a box of the same name, dtype, offsets and sizes, whose
// elements have the same digest. Addresses and versions prove nothing, since memory is reused and
// moved.
//
// A save takes whole files of its base, by a hard link or a copy within the store. The bindings
// call this for each rank, before the layout of its files.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "base/strided.h"
#include "format/index_file.h"
#include "format/stored_index.h"
#include "plan/work.h"

namespace torch_ckpt {

// The FQN and the offsets of a box in its whole tensor.
using BoxName = std::pair<std::string, Dims>;

// A box of the base that may have the elements of an item.
struct BaseBox {
  int64_t position = 0;  // Position of the item in its work.
  StoredPlace place;
  index_records::Digest digest;
};

struct BaseBoxes {
  std::vector<BaseBox> equal;    // Their samples are equal, and the digests of all elements known.
  std::vector<int64_t> changed;  // Positions of items whose samples differ.
};

// Finds the items of a work in the base. `samples` has the digest of the sample of each item, or
// kUnknownDigest. `names` has the name of each box, or nullopt to skip the item; if it is empty,
// the names of the work are used.
// Requires: `names`, unless empty, and `samples` have an element for each item.
// Errors: those of StoredIndex.
Result<BaseBoxes> find_in_base(const StoredIndex& base, const Work& work,
                               std::span<const uint64_t> samples,
                               std::span<const std::optional<BoxName>> names);

// The digest of a slice of a data file, as a rank reports it to the coordinator: 32 bytes.
struct SliceDigest {
  int64_t offset = 0;  // Offset of the slice in the file.
  index_records::Digest digest;
};

// Adds the digests of slices to the boxes of an index. `reports` has, for each file of the index,
// any number of SliceDigests in ascending order of their offsets.
// Errors: kInternal if a report has another form.
Status add_digests(Index& index, std::span<const Bytes> reports);

}  // namespace torch_ckpt
