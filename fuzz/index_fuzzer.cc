// Indexes from arbitrary bytes, looked up in and listed. Where the first byte is odd, every
// checksum is made true before: the checks behind them must hold by themselves.

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "base/strided.h"
#include "format/index_file.h"
#include "format/metadata_trailer.h"
#include "format/stored_index.h"
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
    const int64_t blocks = BlockSums::block_count(file.sums.file_nbytes, file.sums.block_nbytes);
    require(std::ssize(file.sums.sums) == (index.is_foreign ? 0 : blocks),
            "there is a sum for each block");
  }
  for (const IndexedEntry& entry : index.entries) {
    text += static_cast<int64_t>(entry.fqn.size());
    require(checked_numel(entry.sizes).has_value(), "elements can be counted");
    require(entry.is_tensor || entry.boxes.size() == 1, "an object is in one slice");
    require(!entry.view || (index.is_foreign && entry.boxes.size() == 1 &&
                            entry.view->strides.size() == entry.sizes.size()),
            "a view is of the one box of a foreign tensor");
    for (const IndexedBox& box : entry.boxes) check_box(index, entry, box);
  }
  for (const IndexedPath& path : index.paths) text += static_cast<int64_t>(path.fqn.size());
  require(text <= 16 * nbytes, "memory is in proportion to the file");
}

// What one entry says by itself, without the others.
void look_up(const StoredIndex& index, int64_t number) {
  Result<StoredEntry> entry = index.entry(number);
  if (!entry.ok()) return;
  const auto found = index.find_entry(entry->facts.fqn);
  if (found.ok() && found->has_value()) {
    const auto same = index.entry(**found);
    require(same.ok() && same->facts.fqn == entry->facts.fqn, "a name leads to its bearer");
  }
  const Dims& sizes = entry->facts.sizes;
  const Dims zeros(sizes.size(), 0);
  const auto all = index.overlapping(*entry, zeros, sizes);
  const auto boxes = index.boxes(*entry, 0, entry->box_count);
  (void)index.find_box(*entry, zeros, number);
  (void)index.places(*entry);
  if (!boxes.ok()) return;
  require(all.ok(), "boxes that can be read can be met");
  for (const IndexedBox& box : *boxes) {
    require(range_within(box.file, 1, index.file_count()), "the file is there");
    for (size_t d = 0; d < sizes.size(); ++d) {
      require(range_within(box.offsets[d], box.sizes[d], sizes[d]), "boxes lie in tensors");
    }
    const auto file = index.file(box.file);
    if (!file.ok()) continue;
    require(range_within(box.offset, box.nbytes, file->nbytes), "slices lie in files");
    if (index.is_foreign()) continue;
    const auto sums =
        index.sums(*file, 0, BlockGrid::block_count(file->nbytes, index.block_nbytes()));
    const Status checked =
        index.check_sums(*file, 0, BlockGrid::block_count(file->nbytes, index.block_nbytes()));
    require(sums.ok() == checked.ok(), "sums that are checked can be read");
  }
}

void look_up_some(Bytes bytes) {
  const auto opened = StoredIndex::in_memory(bytes);
  if (!opened.ok()) return;
  const StoredIndex& index = **opened;
  constexpr int64_t kMost = 8;
  for (int64_t i = 0; i < std::min(index.entry_count(), kMost); ++i) look_up(index, i);
  for (int64_t i = 0; i < std::min(index.file_count(), kMost); ++i) {
    const auto file = index.file(i);
    if (file.ok()) (void)index.find_file(file->name);
  }
  (void)index.find_entry("model.weight");
  (void)index.version();
  (void)index.damage();
  const bool sound = index.check().ok();
  require(sound == index.read_all().ok(), "what is checked can be read");
  require(!sound || (index.fqns().ok() && index.paths().ok()), "and so can its parts");
}

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  if (size < 1) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data) + 1;
  std::vector<std::byte> bytes(begin, begin + size - 1);
  if (data[0] % 2 == 1) reseal(bytes);
  (void)parse_metadata_trailer(
      Bytes(bytes).last(std::min<size_t>(bytes.size(), kMetadataTrailerNbytes)), ssize(bytes));
  require(pickle_nbytes(bytes) <= ssize(bytes), "a pickle is no longer than its file");
  look_up_some(bytes);
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
