#include "format/index_file.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "base/block_sums.h"
#include "format/checked_blocks.h"
#include "format/index_records.h"
#include "format/stored_index.h"

namespace torch_ckpt {
namespace {

namespace records = index_records;

class IndexWriter {
 public:
  Result<std::vector<std::byte>> write(const Index& index) {
    header_.magic = records::kMagic;
    header_.version = index.is_foreign ? records::kForeignVersion : records::kVersion;
    if (static_cast<int64_t>(index.save_id.size()) != kSaveIdNbytes) {
      return invalid_argument("a save id has ", kSaveIdNbytes, " characters, not ",
                              index.save_id.size());
    }
    std::copy(index.save_id.begin(), index.save_id.end(), header_.save_id.begin());
    header_.metadata_nbytes = static_cast<uint64_t>(index.metadata.nbytes);
    header_.metadata_sum = index.metadata.sum;
    header_.block_nbytes = kSumBlockNbytes;
    header_.writer_revision = index.writer_revision;
    for (const IndexedFile& file : index.files) RETURN_IF_ERROR(add_file(file));
    if (index.has_entries) {
      header_.flags |= records::kHasEntries;
      header_.metadata_version = text(index.version);
      if (!index.stored_save_id.empty()) header_.stored_save_id = text(index.stored_save_id);
      for (const IndexedEntry& entry : index.entries) add_entry(entry);
    }
    if (index.has_paths) {
      header_.flags |= records::kHasPaths;
      for (const IndexedPath& path : index.paths) add_path(path);
    }
    add_digests(index);
    add_names(file_names_, records::kFileNameSection);
    add_names(entry_names_, records::kEntryNameSection);
    if (!fits_) {
      return invalid_argument("cannot write an index: a text or number exceeds its field");
    }
    return assemble();
  }

 private:
  using Bytes_ = std::vector<std::byte>;

  template <typename Record>
  void put(records::SectionId id, const Record& record) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&record);
    sections_[id].insert(sections_[id].end(), bytes, bytes + sizeof(Record));
  }

  // Returns the position of a text. Equal texts are stored once.
  records::Text text(const std::string& value) {
    const auto [known, is_new] = texts_.emplace(value, records::Text{});
    if (is_new) {
      Bytes_& section = sections_[records::kTextSection];
      fits_ = fits_ && section.size() + value.size() <= std::numeric_limits<uint32_t>::max();
      known->second = {static_cast<uint32_t>(section.size()), static_cast<uint32_t>(value.size())};
      const Bytes bytes = as_bytes(value);
      section.insert(section.end(), bytes.begin(), bytes.end());
    }
    return known->second;
  }

  template <typename Number, typename Value>
  Number narrow(Value value) {
    fits_ = fits_ && std::in_range<Number>(value);
    return static_cast<Number>(value);
  }

  Status add_file(const IndexedFile& file) {
    if (file.sums.block_nbytes != header_.block_nbytes) {
      if (!sections_[records::kFileSection].empty()) {
        return invalid_argument("cannot write an index: its files have different block lengths");
      }
      header_.block_nbytes = narrow<uint32_t>(file.sums.block_nbytes);
    }
    file_names_.push_back(name(file.name, file_names_.size()));
    put(records::kFileSection,
        records::File{text(file.name), narrow<uint64_t>(file.sums.file_nbytes),
                      count(records::kSumSection, sizeof(uint64_t))});
    for (const uint64_t sum : file.sums.sums) put(records::kSumSection, sum);
    return ok_status();
  }

  records::Name name(const std::string& value, size_t number) {
    return {xxh3(as_bytes(value)), narrow<uint32_t>(number), 0};
  }

  void add_names(std::vector<records::Name>& names, records::SectionId id) {
    std::sort(names.begin(), names.end());
    for (const records::Name& name : names) put(id, name);
  }

  void add_dims(const Dims& dims) {
    for (const int64_t dim : dims) put(records::kDimSection, dim);
  }

  uint64_t count(records::SectionId id, size_t record_nbytes) const {
    return sections_[id].size() / record_nbytes;
  }

  void add_entry(const IndexedEntry& entry) {
    records::Entry record = {};
    record.fqn = text(entry.fqn);
    record.dtype = text(entry.dtype);
    record.memory_format = text(entry.memory_format);
    record.first_dim = count(records::kDimSection, sizeof(int64_t));
    record.first_box = count(records::kBoxSection, sizeof(records::Box));
    record.box_count = narrow<uint32_t>(entry.boxes.size());
    record.ndim = narrow<uint16_t>(entry.sizes.size());
    record.kind = entry.is_tensor ? records::kTensor : records::kObject;
    record.flags = static_cast<uint8_t>((entry.requires_grad ? records::kRequiresGrad : 0) |
                                        (entry.pin_memory ? records::kPinMemory : 0) |
                                        (entry.view ? records::kHasView : 0));
    entry_names_.push_back(name(entry.fqn, entry_names_.size()));
    put(records::kEntrySection, record);
    add_dims(entry.sizes);
    for (const IndexedBox& box : entry.boxes) {
      fits_ = fits_ && box.offsets.size() == entry.sizes.size() &&
              box.sizes.size() == entry.sizes.size();
      add_dims(box.offsets);
      add_dims(box.sizes);
      std::string transforms;
      for (const std::string& transform : box.transforms) {
        fits_ = fits_ && !transform.empty() &&
                transform.find(records::kTransformSeparator) == std::string::npos;
        if (!transforms.empty()) transforms += records::kTransformSeparator;
        transforms += transform;
      }
      put(records::kBoxSection,
          records::Box{narrow<uint32_t>(box.file), box.plain ? records::kPlain : 0u,
                       narrow<uint64_t>(box.offset), narrow<uint64_t>(box.nbytes),
                       text(transforms)});
    }
    if (!entry.view) return;
    fits_ = fits_ && entry.view->strides.size() == entry.sizes.size();
    add_dims(entry.view->strides);
    add_dims({entry.view->storage_offset, entry.view->crc});
  }

  void add_path(const IndexedPath& path) {
    put(records::kPathSection,
        records::Path{text(path.fqn), count(records::kKeySection, sizeof(records::Key)),
                      path.keys.size()});
    for (const auto& key : path.keys) {
      records::Key record = {};
      if (const auto* number = std::get_if<int64_t>(&key)) {
        record = {records::kIntKey, 0, *number};
      } else {
        const records::Text at = text(std::get<std::string>(key));
        record = {records::kTextKey, at.nbytes, at.offset};
      }
      put(records::kKeySection, record);
    }
  }

  // Adds digests and origins behind all texts, if there are any.
  void add_digests(const Index& index) {
    bool any = false;
    Bytes_ digests;
    Bytes_ origins;
    const auto add = [&any](Bytes_& to, const auto& record) {
      any = any || record != std::remove_cvref_t<decltype(record)>();
      const Bytes bytes = std::as_bytes(std::span(&record, 1));
      to.insert(to.end(), bytes.begin(), bytes.end());
    };
    for (const IndexedFile& file : index.files) add(origins, file.origin);
    if (index.has_entries) {
      for (const IndexedEntry& entry : index.entries) {
        for (const IndexedBox& box : entry.boxes) add(digests, box.digest);
      }
    }
    if (!any) return;
    header_.flags |= records::kHasDigests;
    Bytes_& section = sections_[records::kTextSection];
    const auto append = [&section](const Bytes_& bytes) {
      section.resize(static_cast<size_t>(align_up(ssize(section), 8)));
      const records::Section where = {section.size(), bytes.size()};
      section.insert(section.end(), bytes.begin(), bytes.end());
      return where;  // Within the section.
    };
    header_.digests = append(digests);
    header_.origins = append(origins);
  }

  // Concatenates header, top, table and sections. The length of the sections determines the lengths
  // of top and table.
  Result<Bytes_> assemble() {
    Bytes_ body;
    for (size_t id = 0; id < records::kSectionCount; ++id) {
      Bytes_& section = sections_[id];
      header_.sections[id] = {body.size(), section.size()};
      body.insert(body.end(), section.begin(), section.end());
      body.resize(static_cast<size_t>(align_up(ssize(body), 8)));
      Bytes_().swap(section);
    }
    const std::vector<uint64_t> table_sums = sums_of(body);
    const Bytes table = std::as_bytes(std::span(table_sums));
    const std::vector<uint64_t> top_sums = sums_of(table);
    const Bytes top = std::as_bytes(std::span(top_sums));
    if (ssize(top) > CheckedBlocks::kBlockNbytes) {
      return invalid_argument("an index of ", body.size(), " bytes is too long");
    }
    header_.top = {sizeof(records::Header), top.size()};
    header_.table = {header_.top.offset + top.size(), table.size()};
    header_.top_sum = xxh3(top);
    const uint64_t begin = header_.table.offset + table.size();
    for (records::Section& section : header_.sections) section.offset += begin;
    if ((header_.flags & records::kHasDigests) != 0) {
      header_.digests.offset += header_.sections[records::kTextSection].offset;
      header_.origins.offset += header_.sections[records::kTextSection].offset;
    }
    Bytes_ out(sizeof(records::Header));
    out.reserve(begin + body.size());
    std::memcpy(out.data(), &header_, sizeof(header_));
    header_.header_sum = xxh3(Bytes(out).first(offsetof(records::Header, header_sum)));
    std::memcpy(out.data(), &header_, sizeof(header_));
    for (const Bytes bytes : {top, table, Bytes(body)}) {
      out.insert(out.end(), bytes.begin(), bytes.end());
    }
    return out;
  }

  static std::vector<uint64_t> sums_of(Bytes bytes) {
    BlockSummer summer(CheckedBlocks::kBlockNbytes);
    summer.append(bytes);
    return summer.finish().sums;
  }

  records::Header header_ = {};
  std::array<Bytes_, records::kSectionCount> sections_;
  std::unordered_map<std::string, records::Text> texts_;
  std::vector<records::Name> file_names_;
  std::vector<records::Name> entry_names_;
  bool fits_ = true;
};

}  // namespace

Result<std::vector<std::byte>> write_index(const Index& index) {
  ASSIGN_OR_RETURN(std::vector<std::byte> bytes, IndexWriter().write(index));
  // Reject an unreadable index now: before the commit, the save can still publish without one.
  const auto stored = StoredIndex::in_memory(bytes);
  const Status sound = stored.ok() ? (*stored)->check() : stored.status();
  if (!sound.ok()) return invalid_argument("cannot write an index: ", sound.message());
  return bytes;
}

Result<Index> parse_index(Bytes bytes) {
  ASSIGN_OR_RETURN(const auto stored, StoredIndex::in_memory(bytes));
  return stored->read_all();
}

}  // namespace torch_ckpt
