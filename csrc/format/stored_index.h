#pragma once

// `.index` as it lies in its file, looked up and not read: opening takes one read however long it
// is, an FQN a few blocks of it.
//
// Every byte that is used was checked against its sum, and every number against those that it is
// used with, so that nobody downstream needs to; what concerns all records at once (that no name
// occurs twice, no slices overlap) is checked by those who list them all. Used by the load and
// verify jobs, and by Python, which builds DCP's metadata from it.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/block_sums.h"
#include "base/status.h"
#include "base/strided.h"
#include "format/checked_blocks.h"
#include "format/index_file.h"
#include "format/index_records.h"

namespace torch_ckpt {

struct StoredFile {
  std::string name;
  int64_t nbytes = 0;
  int64_t first_sum = 0;  // Number of the sum of its first block.
};

struct StoredEntry {
  IndexedEntry facts = {};  // Without its boxes.
  int64_t box_count = 0;
  int64_t first_box = 0;  // Numbers of records.
  int64_t first_dim = 0;

  // How many numbers there are from first_dim on.
  int64_t dim_count() const {
    const auto ndim = static_cast<int64_t>(facts.sizes.size());
    return ndim * (1 + 2 * box_count) + (facts.view ? ndim + index_records::kViewDims : 0);
  }
};

// Where a box lies.
struct StoredPlace {
  int64_t file = 0;
  int64_t offset = 0;
  int64_t nbytes = 0;

  auto operator<=>(const StoredPlace&) const = default;
};

// Safe to use from any thread. Whatever fails is kCorruption, which names the file, or an error of
// reading it.
class StoredIndex {
 public:
  // `where` names the file in messages.
  // Errors: kCorruption for what is no index of `nbytes` bytes; kUnsupported for a newer version.
  static Result<std::shared_ptr<const StoredIndex>> open(ReadAt read, int64_t nbytes,
                                                         std::string where);

  // Also a foreign one. Requires: `bytes` outlive it.
  static Result<std::shared_ptr<const StoredIndex>> in_memory(Bytes bytes);

  // All bytes of one in memory; empty for one in a file.
  Bytes memory() const { return memory_; }

  // What the header says.
  const std::string& save_id() const { return save_id_; }
  const FileDigest& metadata() const { return metadata_; }
  bool has_entries() const { return (header_.flags & index_records::kHasEntries) != 0; }
  bool has_paths() const { return (header_.flags & index_records::kHasPaths) != 0; }
  bool is_foreign() const { return header_.version == index_records::kForeignVersion; }
  int64_t nbytes() const { return nbytes_; }
  int64_t block_nbytes() const { return header_.block_nbytes; }  // Of the data files.
  int64_t file_count() const { return count(index_records::kFileSection); }
  int64_t entry_count() const { return count(index_records::kEntrySection); }
  int64_t box_count() const { return count(index_records::kBoxSection); }

  Result<std::string> version() const;  // Metadata.version.

  // By number. Requires: there are so many.
  Result<StoredFile> file(int64_t number) const;
  Result<StoredEntry> entry(int64_t number) const;

  // By name: the number, or nothing.
  Result<std::optional<int64_t>> find_file(std::string_view name) const;
  Result<std::optional<int64_t>> find_entry(std::string_view fqn) const;

  // The boxes [first, last) of an entry, or where they lie. Requires: it has them.
  Result<std::vector<IndexedBox>> boxes(const StoredEntry& entry, int64_t first,
                                        int64_t last) const;
  Result<std::vector<StoredPlace>> places(const StoredEntry& entry) const;

  // The number of the first box of these offsets, if there is one. `guess` is looked at first.
  Result<std::optional<int64_t>> find_box(const StoredEntry& entry, const Dims& offsets,
                                          std::optional<int64_t> guess) const;

  // The numbers of the boxes that share an element with this one.
  // Errors: kMismatch for a box of another rank.
  Result<std::vector<int64_t>> overlapping(const StoredEntry& entry, const Dims& offsets,
                                           const Dims& sizes) const;

  // The sums of the blocks [first, last) of a file. Requires: it has them, as no foreign one does.
  Result<std::vector<uint64_t>> sums(const StoredFile& file, int64_t first, int64_t last) const;

  // Checks what `sums` would read.
  Status check_sums(const StoredFile& file, int64_t first, int64_t last) const;

  // All of one kind, in order, and checked as a whole.
  Result<std::vector<std::string>> fqns() const;
  Result<std::vector<IndexedPath>> paths() const;

  // All there is, checked as a whole; `check` keeps nothing of it.
  Result<Index> read_all() const;
  Status check() const;

  // Damaged parts of the file, ascending.
  Result<std::vector<Region>> damage() const { return blocks_->damage(); }

 private:
  class Scan;  // scan_index.cc
  class TextBudget;

  StoredIndex(const index_records::Header& header, int64_t nbytes, std::string where);
  static Result<std::shared_ptr<const StoredIndex>> open_kind(bool may_be_foreign, ReadAt read,
                                                              int64_t nbytes, std::string where);
  static Result<index_records::Header> read_header(Bytes bytes, bool may_be_foreign,
                                                   const std::string& where);
  Status check_sections(CheckedBlocks::Place* place) const;

  template <typename... Args>
  Status unsound(const Args&... args) const {
    return corruption("cannot read ", where_, ": the index is unsound: ", args...);
  }
  Status to_signed(uint64_t value, int64_t* out) const;

  int64_t count(index_records::SectionId id) const {
    return static_cast<int64_t>(header_.sections[id].nbytes / index_records::kRecordNbytes[id]);
  }
  int64_t offset_of(index_records::SectionId id, int64_t record) const {
    return static_cast<int64_t>(header_.sections[id].offset +
                                static_cast<uint64_t>(record) * index_records::kRecordNbytes[id]);
  }

  // Requires: the records are there.
  template <typename Record>
  Status read_records(index_records::SectionId id, int64_t first, Record* out,
                      int64_t records) const {
    const auto nbytes = static_cast<size_t>(records) * sizeof(Record);
    return blocks_->read(offset_of(id, first), {reinterpret_cast<std::byte*>(out), nbytes});
  }

  Status text(const index_records::Text& where, int64_t max_nbytes, std::string* out) const;
  Status text_of_name(index_records::SectionId id, uint32_t number, std::string* out) const;
  Result<std::optional<int64_t>> find_name(index_records::SectionId names, std::string_view name,
                                           index_records::SectionId bearers) const;
  Status check_names(index_records::SectionId id, const std::vector<std::string>& names) const;
  Status read_view(StoredEntry& entry) const;
  Status to_box(const StoredEntry& entry, const index_records::Box& from, const int64_t* dims,
                IndexedBox* out) const;
  Status to_place(const StoredEntry& entry, const index_records::Box& from, StoredPlace* out) const;
  template <typename Visit>
  Status visit_dims(const StoredEntry& entry, Visit visit) const;

  const index_records::Header header_;
  const int64_t nbytes_;
  const std::string where_;
  std::string save_id_;
  FileDigest metadata_;
  std::unique_ptr<const CheckedBlocks> blocks_;
  Bytes memory_;
};

}  // namespace torch_ckpt
