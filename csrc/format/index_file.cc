#include "format/index_file.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "format/index_records.h"

namespace torch_ckpt {
namespace {

namespace records = index_records;

class IndexWriter {
 public:
  Result<std::vector<std::byte>> write(const Index& index) {
    header_.magic = records::kMagic;
    header_.version = records::kVersion;
    if (static_cast<int64_t>(index.save_id.size()) != kSaveIdNbytes) {
      return invalid_argument("a save id has ", kSaveIdNbytes, " characters, not ",
                              index.save_id.size());
    }
    std::copy(index.save_id.begin(), index.save_id.end(), header_.save_id.begin());
    header_.metadata_nbytes = static_cast<uint64_t>(index.metadata.nbytes);
    header_.metadata_sum = index.metadata.sum;
    header_.block_nbytes = kSumBlockNbytes;
    for (const IndexedFile& file : index.files) RETURN_IF_ERROR(add_file(file));
    if (index.has_entries) {
      header_.flags |= records::kHasEntries;
      header_.metadata_version = text(index.version);
      for (const IndexedEntry& entry : index.entries) add_entry(entry);
    }
    if (index.has_paths) {
      header_.flags |= records::kHasPaths;
      for (const IndexedPath& path : index.paths) add_path(path);
    }
    if (!fits_) return invalid_argument("the index has texts or numbers that it cannot hold");
    return assemble();
  }

 private:
  using Bytes_ = std::vector<std::byte>;

  template <typename Record>
  void put(records::SectionId id, const Record& record) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&record);
    sections_[id].insert(sections_[id].end(), bytes, bytes + sizeof(Record));
  }

  // The place of a text that is stored once, however often it is used.
  records::Text text(const std::string& value) {
    const auto [known, is_new] = texts_.emplace(value, records::Text{});
    if (is_new) {
      Bytes_& all = sections_[records::kTextSection];
      fits_ = fits_ && all.size() + value.size() <= std::numeric_limits<uint32_t>::max();
      known->second = {static_cast<uint32_t>(all.size()), static_cast<uint32_t>(value.size())};
      const Bytes bytes = as_bytes(value);
      all.insert(all.end(), bytes.begin(), bytes.end());
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
        return invalid_argument("the files of an index are summed in blocks of different lengths");
      }
      header_.block_nbytes = narrow<uint32_t>(file.sums.block_nbytes);
    }
    put(records::kFileSection,
        records::File{text(file.name), narrow<uint64_t>(file.sums.file_nbytes)});
    for (const uint64_t sum : file.sums.sums) put(records::kSumSection, sum);
    return ok_status();
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
                                        (entry.pin_memory ? records::kPinMemory : 0));
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

  Bytes_ assemble() {
    Bytes_ out(sizeof(records::Header));
    for (int id = 0; id < records::kSectionCount; ++id) {
      const Bytes_& section = sections_[static_cast<size_t>(id)];
      header_.sections[static_cast<size_t>(id)] = {out.size(), section.size()};
      out.insert(out.end(), section.begin(), section.end());
      out.resize(static_cast<size_t>(align_up(ssize(out), 8)));
    }
    BlockSummer summer(records::kTableBlockNbytes);
    summer.append(Bytes(out).subspan(sizeof(records::Header)));
    const BlockSums sums = summer.finish();
    const Bytes table = std::as_bytes(std::span(sums.sums));
    header_.table = {out.size(), table.size()};
    header_.table_sum = xxh3(table);
    out.insert(out.end(), table.begin(), table.end());
    std::memcpy(out.data(), &header_, sizeof(header_));
    header_.header_sum = xxh3(Bytes(out).first(offsetof(records::Header, header_sum)));
    std::memcpy(out.data(), &header_, sizeof(header_));
    return out;
  }

  records::Header header_ = {};
  std::array<Bytes_, records::kSectionCount> sections_;
  std::unordered_map<std::string, records::Text> texts_;
  bool fits_ = true;
};

}  // namespace

Result<std::vector<std::byte>> write_index(const Index& index) {
  ASSIGN_OR_RETURN(std::vector<std::byte> bytes, IndexWriter().write(index));
  // What readers would refuse is refused here, while the checkpoint that it would belong to can
  // still do without.
  const Result<Index> parsed = parse_index(bytes);
  if (!parsed.ok()) return invalid_argument("cannot write an index: ", parsed.status().message());
  return bytes;
}

}  // namespace torch_ckpt
