// Opens arbitrary bytes as an index, queries it and lists its records. If the first byte is odd,
// the target first corrects every checksum. So the other checks are tested without checksums, too.

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "base/strided.h"
#include "format/index_file.h"
#include "format/metadata_trailer.h"
#include "format/stored_index.h"
#include "support/index_sums.h"

namespace torch_ckpt {
namespace {

void require(bool condition, const char* property) {
  if (condition) return;
  std::cerr << "violated: " << property << std::endl;
  std::abort();
}

void check_box(const Index& index, const IndexedEntry& entry, const IndexedBox& box) {
  require(range_within(box.file, 1, static_cast<int64_t>(index.files.size())), "the file exists");
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
    require(entry.is_tensor || entry.boxes.size() == 1, "an object has one slice");
    require(!entry.view || (index.is_foreign && entry.boxes.size() == 1 &&
                            entry.view->strides.size() == entry.sizes.size()),
            "only a foreign tensor with one box has a view");
    for (const IndexedBox& box : entry.boxes) check_box(index, entry, box);
  }
  for (const IndexedPath& path : index.paths) text += static_cast<int64_t>(path.fqn.size());
  require(text <= 16 * nbytes, "memory is in proportion to the file");
}

// Queries one entry. The other entries may be unsound.
void query_entry(const StoredIndex& index, int64_t number) {
  Result<StoredEntry> entry = index.entry(number);
  if (!entry.ok()) return;
  const auto found = index.find_entry(entry->facts.fqn);
  if (found.ok() && found->has_value()) {
    const auto same = index.entry(**found);
    require(same.ok() && same->facts.fqn == entry->facts.fqn, "a name leads to its entry");
  }
  const Dims& sizes = entry->facts.sizes;
  const Dims zeros(sizes.size(), 0);
  const auto all = index.overlapping(*entry, zeros, sizes);
  const auto boxes = index.boxes(*entry, 0, entry->box_count);
  (void)index.find_box(*entry, zeros, number);
  (void)index.places(*entry);
  // A query of a few boxes: an unsound entry may claim any number.
  for (int64_t box = 0; box < std::min<int64_t>(entry->box_count, 8); ++box) {
    const auto digest = index.digest(*entry, box);
    require(!digest.ok() || index.has_digests() || *digest == index_records::Digest(),
            "an index without digests has none");
  }
  if (!boxes.ok()) return;
  require(all.ok(), "readable boxes can be intersected");
  for (const IndexedBox& box : *boxes) {
    require(range_within(box.file, 1, index.file_count()), "the file exists");
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
    require(sums.ok() == checked.ok(), "sums are readable exactly if they pass the check");
  }
}

void query_index(Bytes bytes) {
  const auto opened = StoredIndex::in_memory(bytes);
  if (!opened.ok()) return;
  const StoredIndex& index = **opened;
  constexpr int64_t kMost = 8;
  for (int64_t i = 0; i < std::min(index.entry_count(), kMost); ++i) query_entry(index, i);
  for (int64_t i = 0; i < std::min(index.file_count(), kMost); ++i) {
    const auto file = index.file(i);
    if (file.ok()) (void)index.find_file(file->name);
    const auto origin = index.origin(i);
    require(!origin.ok() || index.has_digests() || *origin == 0,
            "an index without digests has no origins");
  }
  (void)index.find_entry("model.weight");
  (void)index.version();
  (void)index.stored_save_id();
  (void)index.damage();
  const bool sound = index.check().ok();
  require(sound == index.read_all().ok(), "an index is readable exactly if it passes the check");
  require(!sound || (index.fqns().ok() && index.paths().ok()),
          "the names and paths of a sound index are readable");
}

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  if (size < 1) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data) + 1;
  std::vector<std::byte> bytes(begin, begin + size - 1);
  if (data[0] % 2 == 1) fix_sums(bytes);
  (void)parse_metadata_trailer(
      Bytes(bytes).last(std::min<size_t>(bytes.size(), kMetadataTrailerNbytes)), ssize(bytes));
  query_index(bytes);
  const Result<Index> index = parse_index(bytes);
  if (!index.ok()) return 0;
  check_index(*index, ssize(bytes));
  // A parsed index survives a round trip through write_index.
  const auto written = write_index(*index);
  if (!written.ok()) return 0;  // Overlapping texts need more space when they are written apart.
  const Result<Index> again = parse_index(*written);
  require(again.ok() && *again == *index, "an index survives a round trip");
  return 0;
}
