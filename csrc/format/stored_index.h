#pragma once

// StoredIndex: random access to the records of an index file. Opening takes one read, whatever
// the length of the file. Finding an FQN reads a few blocks.
//
// Every byte is verified against its checksum, and every number against the records that it refers
// to, so callers need no further checks. Properties of all records together (unique names, disjoint
// slices) are checked only by the functions that read all of them. Used by LoadJob and
// VerifyJob, and by Python, which builds DCP's metadata from the index.

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

// Whether the name of a file, relative to the checkpoint directory, stays inside this directory.
bool is_inside_directory(std::string_view name);

struct StoredFile {
  std::string name;
  int64_t nbytes = 0;
  int64_t first_sum = 0;  // Record number of the checksum of the file's first block.
};

struct StoredEntry {
  IndexedEntry facts = {};  // `boxes` is empty.
  int64_t box_count = 0;
  int64_t first_box = 0;  // Record number of the first box.
  int64_t first_dim = 0;  // Record number of the first dim.

  // Returns the number of dims of the entry.
  int64_t dim_count() const {
    const auto ndim = static_cast<int64_t>(facts.sizes.size());
    return ndim * (1 + 2 * box_count) + (facts.view ? ndim + index_records::kViewDims : 0);
  }
};

// The extent of a box.
struct StoredPlace {
  int64_t file = 0;  // File number in the index.
  int64_t offset = 0;
  int64_t nbytes = 0;

  auto operator<=>(const StoredPlace&) const = default;
};

// Safe to use from any thread. All functions that return a Status or Result may fail with
// kCorruption, whose message names the file, and with errors of `ReadAt`.
class StoredIndex {
 public:
  // Opens an index of `nbytes` bytes. `where` names the file in messages.
  // Errors: kCorruption if the bytes are not an index; kUnsupported for a newer version.
  static Result<std::shared_ptr<const StoredIndex>> open(ReadAt read, int64_t nbytes,
                                                         std::string where);

  // Opens an index in memory, which may be foreign. Requires: `bytes` outlive the result.
  static Result<std::shared_ptr<const StoredIndex>> in_memory(Bytes bytes);

  // The bytes of an index in memory; empty for an index in a file.
  Bytes memory() const { return memory_; }

  // Fields of the header.
  const std::string& save_id() const { return save_id_; }
  const FileDigest& metadata() const { return metadata_; }
  bool has_entries() const { return (header_.flags & index_records::kHasEntries) != 0; }
  bool has_paths() const { return (header_.flags & index_records::kHasPaths) != 0; }
  // Whether boxes may have digests, and files an origin.
  bool has_digests() const { return (header_.flags & index_records::kHasDigests) != 0; }
  bool is_foreign() const { return header_.version == index_records::kForeignVersion; }
  // index_records::kWriterRevision of the code that wrote the data files.
  uint32_t writer_revision() const { return header_.writer_revision; }
  int64_t nbytes() const { return nbytes_; }
  int64_t block_nbytes() const { return header_.block_nbytes; }  // Block length of data files.
  int64_t file_count() const { return count(index_records::kFileSection); }
  int64_t entry_count() const { return count(index_records::kEntrySection); }
  int64_t box_count() const { return count(index_records::kBoxSection); }

  Result<std::string> version() const;         // Metadata.version.
  Result<std::string> stored_save_id() const;  // StorageMeta.save_id.

  // Requires: 0 <= number < file_count() or entry_count().
  Result<StoredFile> file(int64_t number) const;
  Result<StoredEntry> entry(int64_t number) const;

  // Finds a file or entry by name. Returns its number, or nullopt.
  Result<std::optional<int64_t>> find_file(std::string_view name) const;
  Result<std::optional<int64_t>> find_entry(std::string_view fqn) const;

  // Returns the boxes [first, last) of an entry. Requires: 0 <= first <= last <= box_count.
  Result<std::vector<IndexedBox>> boxes(const StoredEntry& entry, int64_t first,
                                        int64_t last) const;
  // Returns the digest of a box; zeros if it is unknown. Requires: 0 <= box < box_count.
  Result<index_records::Digest> digest(const StoredEntry& entry, int64_t box) const;
  // Returns the save that wrote a file; 0 if it is the save of the index.
  // Requires: 0 <= number < file_count().
  Result<index_records::Origin> origin(int64_t number) const;
  // Returns the extents of all boxes of an entry.
  Result<std::vector<StoredPlace>> places(const StoredEntry& entry) const;

  // Returns the number of a box with these offsets, or nullopt. Box `guess` is compared first, then
  // all boxes in order. An empty box is returned only if no other one has these offsets.
  Result<std::optional<int64_t>> find_box(const StoredEntry& entry, const Dims& offsets,
                                          std::optional<int64_t> guess) const;

  // Returns the numbers of the boxes that share an element with the given box.
  // Errors: kMismatch if the box has another number of dimensions; kInvalidArgument for a negative
  // offset.
  Result<std::vector<int64_t>> overlapping(const StoredEntry& entry, const Dims& offsets,
                                           const Dims& sizes) const;

  // Returns the checksums of the blocks [first, last) of a file.
  // Requires: the file has these blocks; the index is not foreign.
  Result<std::vector<uint64_t>> sums(const StoredFile& file, int64_t first, int64_t last) const;

  // Verifies the index blocks that `sums` would read.
  Status check_sums(const StoredFile& file, int64_t first, int64_t last) const;

  // Return all FQNs or paths in order, and check these records as a whole.
  Result<std::vector<std::string>> fqns() const;
  Result<std::vector<IndexedPath>> paths() const;

  // Read all records and check them as a whole. `check` stores none of them.
  Result<Index> read_all() const;
  Status check() const;

  // Returns the damaged ranges of the sections in ascending order.
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
  Status check_digests() const;

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

  // Requires: the section has the records [first, first + records).
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
