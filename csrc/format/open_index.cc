// Implements opening an index (stored_index.h): parses the header and locates the sections.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <utility>

#include "base/xxh3.h"
#include "format/stored_index.h"

namespace torch_ckpt {
namespace {

namespace records = index_records;

constexpr uint32_t kMinBlockNbytes = 4096;  // Alignment of direct reads.
constexpr uint32_t kMaxBlockNbytes = 1 << 20;

// Length of the first read, which includes the header and the whole of a small index.
constexpr int64_t kStartNbytes = int64_t{64} << 10;

// Size of the block cache. Block sums of this size cover 256 GiB of data.
constexpr int64_t kCacheNbytes = int64_t{32} << 20;

}  // namespace

Result<std::shared_ptr<const StoredIndex>> StoredIndex::open(ReadAt read, int64_t nbytes,
                                                             std::string where) {
  return open_kind(false, std::move(read), nbytes, std::move(where));
}

Result<std::shared_ptr<const StoredIndex>> StoredIndex::open_kind(bool may_be_foreign, ReadAt read,
                                                                  int64_t nbytes,
                                                                  std::string where) {
  auto start =
      std::make_shared<std::vector<std::byte>>(static_cast<size_t>(std::min(nbytes, kStartNbytes)));
  if (!start->empty()) RETURN_IF_ERROR(read(0, *start));
  ASSIGN_OR_RETURN(const records::Header header, read_header(*start, may_be_foreign, where));
  std::shared_ptr<StoredIndex> index(new StoredIndex(header, nbytes, std::move(where)));
  RETURN_IF_ERROR(index->to_signed(header.metadata_nbytes, &index->metadata_.nbytes));
  CheckedBlocks::Place place;
  RETURN_IF_ERROR(index->check_sections(&place));
  ReadAt read_rest = [start, read = std::move(read)](int64_t offset, MutableBytes into) {
    if (!range_within(offset, ssize(into), ssize(*start))) return read(offset, into);
    std::copy_n(start->begin() + offset, into.size(), into.begin());
    return ok_status();
  };
  index->blocks_ = std::make_unique<const CheckedBlocks>(std::move(read_rest), place, kCacheNbytes,
                                                         index->where_);
  return std::shared_ptr<const StoredIndex>(std::move(index));
}

Result<std::shared_ptr<const StoredIndex>> StoredIndex::in_memory(Bytes bytes) {
  const auto read = [bytes](int64_t offset, MutableBytes into) {
    const Bytes from = slice(bytes, offset, ssize(into));
    std::copy(from.begin(), from.end(), into.begin());
    return ok_status();
  };
  ASSIGN_OR_RETURN(auto index, open_kind(true, read, ssize(bytes), "the index"));
  std::const_pointer_cast<StoredIndex>(index)->memory_ = bytes;
  return index;
}

StoredIndex::StoredIndex(const records::Header& header, int64_t nbytes, std::string where)
    : header_(header),
      nbytes_(nbytes),
      where_(std::move(where)),
      save_id_(header.save_id.data(), header.save_id.size()),
      metadata_{0, header.metadata_sum} {}

Result<records::Header> StoredIndex::read_header(Bytes bytes, bool may_be_foreign,
                                                 const std::string& where) {
  records::Header header;
  if (bytes.size() < sizeof(header)) {
    return corruption("cannot read ", where, ": an index of ", bytes.size(),
                      " bytes has no header");
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != records::kMagic) {
    return corruption("cannot read ", where, ": the file has no index signature");
  }
  if (header.header_sum != xxh3(bytes.first(offsetof(records::Header, header_sum)))) {
    return corruption("cannot read ", where, ": the header of the index fails its checksum");
  }
  const bool is_foreign = may_be_foreign && header.version == records::kForeignVersion;
  if (header.version != records::kVersion && !is_foreign) {
    return unsupported("cannot read ", where, ": the index has version ", header.version,
                       "; this build reads ", records::kVersion);
  }
  return header;
}

// Checks that the sections are contiguous and fill the file.
Status StoredIndex::check_sections(CheckedBlocks::Place* place) const {
  uint64_t end = sizeof(records::Header);
  const auto nbytes = static_cast<uint64_t>(nbytes_);
  const auto follows = [&](const records::Section& section) {
    if (section.offset != end || section.nbytes > nbytes - end) return false;
    end += (section.nbytes + 7) / 8 * 8;
    return end <= nbytes;
  };
  const auto region = [](const records::Section& section) {
    return Region{static_cast<int64_t>(section.offset), static_cast<int64_t>(section.nbytes)};
  };
  bool whole = follows(header_.top) && follows(header_.table);
  place->top = region(header_.top);
  place->table = region(header_.table);
  place->top_sum = header_.top_sum;
  place->body = {static_cast<int64_t>(end), static_cast<int64_t>(nbytes - std::min(end, nbytes))};
  for (const records::Section& section : header_.sections) whole = whole && follows(section);
  if (!whole || end != nbytes) {
    return corruption("cannot read ", where_, ": the index is ", nbytes_,
                      " bytes long: it is cut off or damaged");
  }
  for (size_t id = 0; id < records::kSectionCount; ++id) {
    if (header_.sections[id].nbytes % records::kRecordNbytes[id] != 0) {
      return unsound("a section ends within a record");
    }
  }
  if (!CheckedBlocks::is_whole(*place)) {
    return unsound("it has too few or too many checksums of its blocks");
  }
  if (count(records::kFileSection) != count(records::kFileNameSection) ||
      count(records::kEntrySection) != count(records::kEntryNameSection) ||
      count(records::kFileSection) > std::numeric_limits<uint32_t>::max() ||
      count(records::kEntrySection) > std::numeric_limits<uint32_t>::max()) {
    return unsound("names are missing");
  }
  if (!std::has_single_bit(header_.block_nbytes) || header_.block_nbytes < kMinBlockNbytes ||
      header_.block_nbytes > kMaxBlockNbytes) {
    return unsound("its blocks are ", header_.block_nbytes, " bytes long");
  }
  if ((entry_count() > 0 && !has_entries()) || (count(records::kPathSection) > 0 && !has_paths())) {
    return unsound("records are left over");
  }
  return has_digests() ? check_digests() : ok_status();
}

Status StoredIndex::check_digests() const {
  const records::Section& text = header_.sections[records::kTextSection];
  const auto is_sound = [&](const records::Section& section, int64_t count, uint64_t record) {
    return section.nbytes == static_cast<uint64_t>(count) * record &&
           section.offset >= text.offset && section.offset - text.offset <= text.nbytes &&
           section.nbytes <= text.nbytes - (section.offset - text.offset);
  };
  if (!is_sound(header_.digests, box_count(), sizeof(records::Digest)) ||
      !is_sound(header_.origins, file_count(), sizeof(records::Origin))) {
    return unsound("digests are missing");
  }
  return ok_status();
}

}  // namespace torch_ckpt
