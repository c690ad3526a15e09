// Indexes from arbitrary bytes. Where the first byte is odd, every checksum is made true before the
// rest is parsed: the checks behind them must hold by themselves.

#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "base/strided.h"
#include "format/index_file.h"
#include "support/sealed_index.h"

namespace torch_ckpt {
namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "does not hold: " << what << std::endl;
  std::abort();
}

void check_box(const Index& index, const IndexedEntry& entry, const IndexedBox& box) {
  require(range_within(box.file, 1, static_cast<int64_t>(index.files.size())), "the file is there");
  const IndexedFile& file = index.files[static_cast<size_t>(box.file)];
  require(range_within(box.offset, box.nbytes, file.sums.file_nbytes), "slices lie in files");
  require(box.offsets.size() == entry.sizes.size() && box.sizes.size() == entry.sizes.size(),
          "boxes have the dimensions of their tensor");
  for (size_t d = 0; d < entry.sizes.size(); ++d) {
    require(range_within(box.offsets[d], box.sizes[d], entry.sizes[d]), "boxes lie in tensors");
  }
}

void check_index(const Index& index, int64_t nbytes) {
  int64_t text = 0;
  for (const IndexedFile& file : index.files) {
    text += static_cast<int64_t>(file.name.size());
    require(file.name.find('/') == std::string::npos, "files lie in the directory");
    require(std::ssize(file.sums.sums) ==
                BlockSums::block_count(file.sums.file_nbytes, file.sums.block_nbytes),
            "there is a sum for each block");
  }
  for (const IndexedEntry& entry : index.entries) {
    text += static_cast<int64_t>(entry.fqn.size());
    require(checked_numel(entry.sizes).has_value(), "elements can be counted");
    require(entry.is_tensor || entry.boxes.size() == 1, "an object is in one slice");
    for (const IndexedBox& box : entry.boxes) check_box(index, entry, box);
  }
  for (const IndexedPath& path : index.paths) text += static_cast<int64_t>(path.fqn.size());
  require(text <= 16 * nbytes, "memory is in proportion to the file");
}

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  if (size < 1) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data) + 1;
  std::vector<std::byte> bytes(begin, begin + size - 1);
  if (data[0] % 2 == 1) reseal(bytes);
  (void)parse_index_identity(bytes);
  const Result<Index> index = parse_index(bytes);
  if (!index.ok()) return 0;
  check_index(*index, ssize(bytes));
  // What was read can be written, and is the same when it is read again.
  const auto written = write_index(*index);
  if (!written.ok()) return 0;  // Text that was shared in part needs more room.
  const Result<Index> again = parse_index(*written);
  require(again.ok() && *again == *index, "an index survives being written");
  return 0;
}
