// The reading half of index_file.h.

#include <algorithm>
#include <bit>
#include <limits>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/strided.h"
#include "format/index_file.h"
#include "format/index_records.h"

namespace torch_ckpt {
namespace {

namespace records = index_records;

constexpr uint16_t kMaxNdim = 64;
constexpr int64_t kMaxItemsize = 16;
constexpr uint32_t kMinBlockNbytes = 4096;  // What direct reads ask for.
constexpr uint32_t kMaxBlockNbytes = 1 << 20;

static_assert(kIndexHeaderNbytes == sizeof(records::Header));

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i++]);
    if (lead < 0x80) continue;
    const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || text.size() - i < static_cast<size_t>(more)) return false;
    uint32_t code = lead & (0x3Fu >> more);
    for (int k = 0; k < more; ++k, ++i) {
      const auto byte = static_cast<uint8_t>(text[i]);
      if ((byte & 0xC0) != 0x80) return false;
      code = code << 6 | (byte & 0x3F);
    }
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (code < kLeast[more] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
  }
  return true;
}

Result<records::Header> read_header(Bytes bytes) {
  records::Header header;
  if (bytes.size() < sizeof(header)) {
    return corruption("an index of ", bytes.size(), " bytes has no header");
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != records::kMagic) return corruption("the file does not begin like an index");
  if (header.header_sum != xxh3(bytes.first(offsetof(records::Header, header_sum)))) {
    return corruption("the header of the index fails its checksum");
  }
  if (header.version != records::kVersion) {
    return unsupported("the index has version ", header.version, "; this build reads ",
                       records::kVersion);
  }
  return header;
}

// Whether a file of this name lies in the checkpoint's directory and nowhere else.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

class IndexParser {
 public:
  explicit IndexParser(Bytes bytes)
      : bytes_(bytes), text_left_(records::kMaxTextUse * ssize(bytes)) {}

  Result<Index> parse() {
    ASSIGN_OR_RETURN(header_, read_header(bytes_));
    RETURN_IF_ERROR(check_sections());
    RETURN_IF_ERROR(check_sums());
    index_.save_id.assign(header_.save_id.data(), header_.save_id.size());
    RETURN_IF_ERROR(to_signed(header_.metadata_nbytes, &index_.metadata.nbytes));
    index_.metadata.sum = header_.metadata_sum;
    RETURN_IF_ERROR(parse_files());
    index_.has_entries = (header_.flags & records::kHasEntries) != 0;
    index_.has_paths = (header_.flags & records::kHasPaths) != 0;
    if (index_.has_entries) RETURN_IF_ERROR(text(header_.metadata_version, &index_.version));
    RETURN_IF_ERROR(parse_entries());
    RETURN_IF_ERROR(check_overlap());
    RETURN_IF_ERROR(parse_paths());
    return std::move(index_);
  }

 private:
  // The checksums hold, so this was written wrong, or to do harm.
  template <typename... Args>
  static Status unsound(const Args&... args) {
    return corruption("the index is unsound: ", args...);
  }

  static Status to_signed(uint64_t value, int64_t* out) {
    if (!std::in_range<int64_t>(value)) return unsound("a number is too large");
    *out = static_cast<int64_t>(value);
    return ok_status();
  }

  // Sections follow one another without holes and fill the file.
  Status check_sections() {
    constexpr size_t kRecordNbytes[] = {1,
                                        sizeof(records::File),
                                        sizeof(uint64_t),
                                        sizeof(records::Entry),
                                        sizeof(records::Box),
                                        sizeof(int64_t),
                                        sizeof(records::Path),
                                        sizeof(records::Key)};
    uint64_t end = sizeof(records::Header);
    for (size_t id = 0; id <= records::kSectionCount; ++id) {
      const bool is_table = id == records::kSectionCount;
      const records::Section& section = is_table ? header_.table : header_.sections[id];
      if (section.offset != end || section.nbytes > bytes_.size() - end) {
        return corruption("the index is ", bytes_.size(), " bytes long: it is cut off or damaged");
      }
      if (section.nbytes % (is_table ? sizeof(uint64_t) : kRecordNbytes[id]) != 0) {
        return unsound("a section ends within a record");
      }
      end += (section.nbytes + 7) / 8 * 8;
      if (end > bytes_.size()) return corruption("the index is cut off");
    }
    if (end != bytes_.size()) return corruption("bytes follow the end of the index");
    return ok_status();
  }

  Status check_sums() const {
    const Bytes table = at(header_.table);
    if (xxh3(table) != header_.table_sum) {
      return corruption("the checksums of the index, at ", header_.table.offset,
                        ", fail their own checksum");
    }
    BlockSums sums;
    sums.block_nbytes = records::kTableBlockNbytes;
    const Bytes body =
        bytes_.subspan(sizeof(records::Header), header_.table.offset - sizeof(records::Header));
    sums.file_nbytes = ssize(body);
    sums.sums.resize(table.size() / sizeof(uint64_t));
    if (std::cmp_not_equal(sums.sums.size(),
                           BlockSums::block_count(sums.file_nbytes, sums.block_nbytes))) {
      return unsound("it has too few checksums of its own, or too many");
    }
    if (!table.empty()) std::memcpy(sums.sums.data(), table.data(), table.size());
    const int64_t mismatch = sums.first_mismatch(0, body);
    if (mismatch < 0) return ok_status();
    return corruption("the index fails its checksum in the ", sums.block_nbytes, " bytes at ",
                      mismatch + static_cast<int64_t>(sizeof(records::Header)));
  }

  Bytes at(const records::Section& section) const {
    return bytes_.subspan(section.offset, section.nbytes);
  }
  template <typename Record>
  uint64_t count(records::SectionId id) const {
    return header_.sections[id].nbytes / sizeof(Record);
  }
  // Requires: i < count<Record>(id).
  template <typename Record>
  Record record(records::SectionId id, uint64_t i) const {
    Record out;
    std::memcpy(&out, bytes_.data() + header_.sections[id].offset + i * sizeof(Record),
                sizeof(Record));
    return out;
  }

  Status text(const records::Text& where, std::string* out) {
    const Bytes all = at(header_.sections[records::kTextSection]);
    if (where.offset > all.size() || where.nbytes > all.size() - where.offset) {
      return unsound("a text lies outside");
    }
    text_left_ -= where.nbytes;
    if (text_left_ < 0) return unsound("it uses too much text");
    out->assign(as_text(all.subspan(where.offset, where.nbytes)));
    return is_utf8(*out) ? ok_status() : unsound("a text is not UTF-8");
  }

  Status word(const records::Text& where, std::string* out) {
    if (where.nbytes > records::kMaxWordNbytes) return unsound("a word is too long");
    return text(where, out);
  }

  Status parse_files() {
    std::unordered_set<std::string> names;
    uint64_t next_sum = 0;
    const uint64_t sum_count = count<uint64_t>(records::kSumSection);
    if (!std::has_single_bit(header_.block_nbytes) || header_.block_nbytes < kMinBlockNbytes ||
        header_.block_nbytes > kMaxBlockNbytes) {
      return unsound("its blocks are ", header_.block_nbytes, " bytes long");
    }
    for (uint64_t i = 0; i < count<records::File>(records::kFileSection); ++i) {
      const auto file = record<records::File>(records::kFileSection, i);
      IndexedFile out;
      RETURN_IF_ERROR(text(file.name, &out.name));
      if (!is_plain_name(out.name) || !names.insert(out.name).second) {
        return unsound("it names a file twice, or outside the checkpoint: ", out.name);
      }
      out.sums.block_nbytes = header_.block_nbytes;
      RETURN_IF_ERROR(to_signed(file.nbytes, &out.sums.file_nbytes));
      const auto blocks = static_cast<uint64_t>(
          BlockSums::block_count(out.sums.file_nbytes, out.sums.block_nbytes));
      if (blocks > sum_count - next_sum) return unsound("checksums are missing for ", out.name);
      out.sums.sums.resize(blocks);
      if (blocks > 0) {
        std::memcpy(out.sums.sums.data(),
                    at(header_.sections[records::kSumSection]).data() + next_sum * sizeof(uint64_t),
                    blocks * sizeof(uint64_t));
      }
      next_sum += blocks;
      index_.files.push_back(std::move(out));
    }
    return next_sum == sum_count ? ok_status() : unsound("checksums are left over");
  }

  // The next `ndim` numbers, of which none is negative.
  Status dims(uint16_t ndim, Dims* out) {
    if (ndim > count<int64_t>(records::kDimSection) - next_dim_) {
      return unsound("sizes or offsets are missing");
    }
    out->resize(ndim);
    for (int64_t& dim : *out) {
      dim = record<int64_t>(records::kDimSection, next_dim_++);
      if (dim < 0) return unsound("a size or offset is negative");
    }
    return ok_status();
  }

  Status parse_entries() {
    const uint64_t entries = count<records::Entry>(records::kEntrySection);
    std::unordered_set<std::string> fqns;
    for (uint64_t i = 0; i < entries; ++i) {
      IndexedEntry entry;
      RETURN_IF_ERROR(parse_entry(record<records::Entry>(records::kEntrySection, i), &entry));
      if (!fqns.insert(entry.fqn).second) return unsound("it lists ", entry.fqn, " twice");
      index_.entries.push_back(std::move(entry));
    }
    if (next_dim_ != count<int64_t>(records::kDimSection) ||
        next_box_ != count<records::Box>(records::kBoxSection) ||
        (entries > 0 && !index_.has_entries)) {
      return unsound("records are left over");
    }
    return ok_status();
  }

  Status parse_entry(const records::Entry& from, IndexedEntry* out) {
    RETURN_IF_ERROR(text(from.fqn, &out->fqn));
    RETURN_IF_ERROR(word(from.dtype, &out->dtype));
    RETURN_IF_ERROR(word(from.memory_format, &out->memory_format));
    if (from.kind > records::kTensor || from.ndim > kMaxNdim || from.first_dim != next_dim_ ||
        from.first_box != next_box_) {
      return unsound("the record of ", out->fqn, " contradicts the others");
    }
    out->is_tensor = from.kind == records::kTensor;
    if (!out->is_tensor && (from.ndim != 0 || from.box_count != 1)) {
      return unsound("an object has sizes or several boxes: ", out->fqn);
    }
    out->requires_grad = (from.flags & records::kRequiresGrad) != 0;
    out->pin_memory = (from.flags & records::kPinMemory) != 0;
    RETURN_IF_ERROR(dims(from.ndim, &out->sizes));
    const auto numel = checked_numel(out->sizes);
    if (!numel || !checked_mul(*numel, kMaxItemsize)) {
      return unsound(out->fqn, " has too many elements");
    }
    for (uint32_t i = 0; i < from.box_count; ++i) {
      IndexedBox box;
      RETURN_IF_ERROR(parse_box(*out, &box));
      out->boxes.push_back(std::move(box));
    }
    return ok_status();
  }

  Status parse_box(const IndexedEntry& entry, IndexedBox* out) {
    if (next_box_ >= count<records::Box>(records::kBoxSection)) return unsound("boxes are missing");
    const auto from = record<records::Box>(records::kBoxSection, next_box_++);
    const auto ndim = static_cast<uint16_t>(entry.sizes.size());
    RETURN_IF_ERROR(dims(ndim, &out->offsets));
    RETURN_IF_ERROR(dims(ndim, &out->sizes));
    for (uint16_t d = 0; d < ndim; ++d) {
      if (!range_within(out->offsets[d], out->sizes[d], entry.sizes[d])) {
        return unsound("a box of ", entry.fqn, " reaches beyond it");
      }
    }
    if (from.file >= index_.files.size()) return unsound(entry.fqn, " lies in no file");
    out->file = from.file;
    RETURN_IF_ERROR(to_signed(from.offset, &out->offset));
    RETURN_IF_ERROR(to_signed(from.nbytes, &out->nbytes));
    const IndexedFile& file = index_.files[from.file];
    if (!range_within(out->offset, out->nbytes, file.sums.file_nbytes)) {
      return unsound(entry.fqn, " reaches beyond ", file.name);
    }
    out->plain = (from.flags & records::kPlain) != 0;
    std::string transforms;
    RETURN_IF_ERROR(text(from.transforms, &transforms));
    for (size_t begin = 0; begin < transforms.size();) {
      const size_t end =
          std::min(transforms.find(records::kTransformSeparator, begin), transforms.size());
      if (end == begin) return unsound("a transform of ", entry.fqn, " has no name");
      out->transforms.push_back(transforms.substr(begin, end - begin));
      begin = end + 1;
    }
    return ok_status();
  }

  // No two slices share a byte.
  Status check_overlap() const {
    struct Extent {
      int64_t file;
      int64_t begin;
      int64_t end;
      auto operator<=>(const Extent&) const = default;
    };
    std::vector<Extent> extents;
    for (const IndexedEntry& entry : index_.entries) {
      for (const IndexedBox& box : entry.boxes) {
        if (box.nbytes > 0) extents.push_back({box.file, box.offset, box.offset + box.nbytes});
      }
    }
    std::sort(extents.begin(), extents.end());
    for (size_t i = 1; i < extents.size(); ++i) {
      if (extents[i].file == extents[i - 1].file && extents[i].begin < extents[i - 1].end) {
        return unsound("slices overlap at ", extents[i].begin, " of ",
                       index_.files[static_cast<size_t>(extents[i].file)].name);
      }
    }
    return ok_status();
  }

  Status parse_paths() {
    uint64_t next_key = 0;
    const uint64_t keys = count<records::Key>(records::kKeySection);
    for (uint64_t i = 0; i < count<records::Path>(records::kPathSection); ++i) {
      const auto from = record<records::Path>(records::kPathSection, i);
      IndexedPath path;
      RETURN_IF_ERROR(text(from.fqn, &path.fqn));
      if (from.first_key != next_key || from.key_count > keys - next_key) {
        return unsound("the path of ", path.fqn, " is missing");
      }
      for (uint64_t k = 0; k < from.key_count; ++k) {
        const auto key = record<records::Key>(records::kKeySection, next_key++);
        if (key.kind == records::kIntKey) {
          path.keys.emplace_back(key.value);
          continue;
        }
        if (key.kind != records::kTextKey || !std::in_range<uint32_t>(key.value)) {
          return unsound("the path of ", path.fqn, " has an odd key");
        }
        std::string value;
        RETURN_IF_ERROR(text({static_cast<uint32_t>(key.value), key.nbytes}, &value));
        path.keys.emplace_back(std::move(value));
      }
      index_.paths.push_back(std::move(path));
    }
    if (next_key != keys || (!index_.paths.empty() && !index_.has_paths)) {
      return unsound("keys are left over");
    }
    return ok_status();
  }

  const Bytes bytes_;
  int64_t text_left_;
  records::Header header_ = {};
  Index index_;
  uint64_t next_dim_ = 0;
  uint64_t next_box_ = 0;
};

}  // namespace

Result<IndexIdentity> parse_index_identity(Bytes header) {
  ASSIGN_OR_RETURN(const records::Header from, read_header(header));
  IndexIdentity out;
  out.save_id.assign(from.save_id.data(), from.save_id.size());
  if (!std::in_range<int64_t>(from.metadata_nbytes)) {
    return corruption("the header of the index is unsound");
  }
  out.metadata = {static_cast<int64_t>(from.metadata_nbytes), from.metadata_sum};
  uint64_t nbytes;
  if (__builtin_add_overflow(from.table.offset, from.table.nbytes, &nbytes) ||
      !std::in_range<int64_t>(nbytes)) {
    return corruption("the header of the index is unsound");
  }
  out.nbytes = static_cast<int64_t>(nbytes);
  return out;
}

Result<Index> parse_index(Bytes bytes) { return IndexParser(bytes).parse(); }

}  // namespace torch_ckpt
