#include "format/stored_index.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

#include "base/dtype.h"
#include "base/xxh3.h"

namespace torch_ckpt {
namespace {

namespace records = index_records;

constexpr uint16_t kMaxNdim = 64;

// Number of records in one read.
constexpr int64_t kRecordsAtATime = 1024;

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

// Interpolates the position in [low, high) of a hash, assuming uniformly distributed hashes.
int64_t expected_position(uint64_t hash, uint64_t low_hash, uint64_t high_hash, int64_t low,
                          int64_t high) {
  if (hash <= low_hash || high_hash <= low_hash) return low;
  const double fraction =
      static_cast<double>(hash - low_hash) / (static_cast<double>(high_hash - low_hash) + 1);
  const auto at = low + static_cast<int64_t>(fraction * static_cast<double>(high - low));
  return std::clamp(at, low, high - 1);
}

}  // namespace

bool is_inside_directory(std::string_view name) {
  if (name.empty() || name == "." || name.front() == '/') return false;
  if (name.find('\0') != std::string_view::npos) return false;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") return false;
    begin = end + 1;
  }
  return true;
}

Status StoredIndex::to_signed(uint64_t value, int64_t* out) const {
  if (!std::in_range<int64_t>(value)) return unsound("a number is too large");
  *out = static_cast<int64_t>(value);
  return ok_status();
}

Status StoredIndex::text(const records::Text& at, int64_t max_nbytes, std::string* out) const {
  const auto all = static_cast<int64_t>(header_.sections[records::kTextSection].nbytes);
  if (!range_within(at.offset, at.nbytes, all)) return unsound("a text lies outside its section");
  if (at.nbytes > max_nbytes) return unsound("a text is ", at.nbytes, " bytes long");
  out->resize(at.nbytes);
  RETURN_IF_ERROR(read_records(records::kTextSection, at.offset, out->data(), at.nbytes));
  return is_utf8(*out) ? ok_status() : unsound("a text is not UTF-8");
}

Result<std::string> StoredIndex::version() const {
  std::string out;
  if (has_entries()) RETURN_IF_ERROR(text(header_.metadata_version, records::kMaxWordNbytes, &out));
  return out;
}

Result<std::string> StoredIndex::stored_save_id() const {
  const records::Text& at = header_.stored_save_id;
  if (!has_entries() || at.nbytes == 0) return save_id_;
  std::string out;
  RETURN_IF_ERROR(text(at, records::kMaxTextNbytes, &out));
  return out;
}

Result<StoredFile> StoredIndex::file(int64_t number) const {
  records::File from;
  RETURN_IF_ERROR(read_records(records::kFileSection, number, &from, 1));
  StoredFile out;
  RETURN_IF_ERROR(text(from.name, records::kMaxTextNbytes, &out.name));
  // The engine writes no subdirectories. Other formats have them.
  const bool is_in_subdirectory = !is_foreign() && out.name.find('/') != std::string::npos;
  if (is_in_subdirectory || !is_inside_directory(out.name)) {
    return unsound("it names a file outside the checkpoint");
  }
  RETURN_IF_ERROR(to_signed(from.nbytes, &out.nbytes));
  RETURN_IF_ERROR(to_signed(from.first_sum, &out.first_sum));
  const int64_t blocks = is_foreign() ? 0 : BlockGrid::block_count(out.nbytes, block_nbytes());
  if (!range_within(out.first_sum, blocks, count(records::kSumSection))) {
    return unsound("checksums are missing for ", out.name);
  }
  return out;
}

Result<StoredEntry> StoredIndex::entry(int64_t number) const {
  records::Entry from;
  RETURN_IF_ERROR(read_records(records::kEntrySection, number, &from, 1));
  StoredEntry out;
  IndexedEntry& facts = out.facts;
  RETURN_IF_ERROR(text(from.fqn, records::kMaxTextNbytes, &facts.fqn));
  RETURN_IF_ERROR(text(from.dtype, records::kMaxWordNbytes, &facts.dtype));
  RETURN_IF_ERROR(text(from.memory_format, records::kMaxWordNbytes, &facts.memory_format));
  RETURN_IF_ERROR(to_signed(from.first_dim, &out.first_dim));
  RETURN_IF_ERROR(to_signed(from.first_box, &out.first_box));
  out.box_count = from.box_count;
  facts.is_tensor = from.kind == records::kTensor;
  facts.requires_grad = (from.flags & records::kRequiresGrad) != 0;
  facts.pin_memory = (from.flags & records::kPinMemory) != 0;
  facts.sizes.resize(std::min(from.ndim, kMaxNdim));
  if ((from.flags & records::kHasView) != 0) facts.view.emplace();
  const int64_t dims = out.dim_count();  // Less than 2 ** 40.
  if (from.kind > records::kTensor || from.ndim > kMaxNdim ||
      !range_within(out.first_dim, dims, count(records::kDimSection)) ||
      !range_within(out.first_box, out.box_count, box_count())) {
    return unsound("the record of ", facts.fqn, " contradicts the others");
  }
  if (!facts.is_tensor && (from.ndim != 0 || from.box_count != 1)) {
    return unsound("an object has sizes or several boxes: ", facts.fqn);
  }
  RETURN_IF_ERROR(read_records(records::kDimSection, out.first_dim, facts.sizes.data(), from.ndim));
  for (const int64_t size : facts.sizes) {
    if (size < 0) return unsound("a size of ", facts.fqn, " is negative");
  }
  const auto numel = checked_numel(facts.sizes);
  if (!numel || !checked_mul(*numel, kMaxItemsize)) {
    return unsound(facts.fqn, " has too many elements");
  }
  RETURN_IF_ERROR(read_view(out));
  return out;
}

Status StoredIndex::read_view(StoredEntry& entry) const {
  if (!entry.facts.view) return ok_status();
  const size_t ndim = entry.facts.sizes.size();
  std::vector<int64_t> numbers(ndim + records::kViewDims);
  const int64_t first = entry.first_dim + entry.dim_count() - ssize(numbers);
  RETURN_IF_ERROR(read_records(records::kDimSection, first, numbers.data(), ssize(numbers)));
  const bool is_signed = std::any_of(numbers.begin(), numbers.end(), [](auto n) { return n < 0; });
  if (!is_foreign() || entry.box_count != 1 || is_signed ||
      !std::in_range<uint32_t>(numbers[ndim + 1])) {
    return unsound("the view of ", entry.facts.fqn, " is invalid");
  }
  entry.facts.view->storage_offset = numbers[ndim];
  entry.facts.view->crc = static_cast<uint32_t>(numbers[ndim + 1]);
  numbers.resize(ndim);
  entry.facts.view->strides = std::move(numbers);
  return ok_status();
}

// File and Entry records both begin with the text of their name.
Status StoredIndex::text_of_name(records::SectionId id, uint32_t number, std::string* out) const {
  static_assert(offsetof(records::File, name) == 0 && offsetof(records::Entry, fqn) == 0);
  if (std::cmp_greater_equal(number, count(id))) return unsound("a name belongs to no record");
  records::Text at;
  RETURN_IF_ERROR(
      blocks_->read(offset_of(id, number), {reinterpret_cast<std::byte*>(&at), sizeof(at)}));
  return text(at, records::kMaxTextNbytes, out);
}

// Interpolation search. Hashes are distributed uniformly, so the first guess is usually within a
// block of the result. Every second step bisects, which bounds the steps for any distribution.
Result<std::optional<int64_t>> StoredIndex::find_name(records::SectionId names,
                                                      std::string_view name,
                                                      records::SectionId bearers) const {
  const uint64_t hash = xxh3(as_bytes(name));
  // Names before `low` have smaller hashes; names from `high` on do not.
  int64_t low = 0;
  int64_t high = count(names);
  uint64_t low_hash = 0;
  uint64_t high_hash = std::numeric_limits<uint64_t>::max();
  records::Name found;
  for (int step = 0; low < high; ++step) {
    const int64_t at = step % 2 == 0 ? expected_position(hash, low_hash, high_hash, low, high)
                                     : low + (high - low) / 2;
    RETURN_IF_ERROR(read_records(names, at, &found, 1));
    if (found.hash < hash) {
      low = at + 1;
      low_hash = found.hash;
    } else {
      high = at;
      high_hash = found.hash;
    }
  }
  std::optional<int64_t> number;
  std::string text;
  for (int64_t at = low; at < count(names); ++at) {
    RETURN_IF_ERROR(read_records(names, at, &found, 1));
    if (found.hash != hash) break;
    if (at - low == records::kMaxSameHash) return unsound("too many names have one hash");
    RETURN_IF_ERROR(text_of_name(bearers, found.number, &text));
    if (text != name) continue;
    if (number.has_value()) return unsound("it lists ", text, " twice");
    number = found.number;
  }
  return number;
}

Result<std::optional<int64_t>> StoredIndex::find_file(std::string_view name) const {
  return find_name(records::kFileNameSection, name, records::kFileSection);
}

Result<std::optional<int64_t>> StoredIndex::find_entry(std::string_view fqn) const {
  return find_name(records::kEntryNameSection, fqn, records::kEntrySection);
}

Status StoredIndex::to_place(const StoredEntry& entry, const records::Box& from,
                             StoredPlace* out) const {
  const std::string& fqn = entry.facts.fqn;
  if (std::cmp_greater_equal(from.file, file_count())) return unsound(fqn, " lies in no file");
  out->file = from.file;
  RETURN_IF_ERROR(to_signed(from.offset, &out->offset));
  RETURN_IF_ERROR(to_signed(from.nbytes, &out->nbytes));
  records::File file;
  RETURN_IF_ERROR(read_records(records::kFileSection, from.file, &file, 1));
  int64_t file_nbytes;
  RETURN_IF_ERROR(to_signed(file.nbytes, &file_nbytes));
  if (!range_within(out->offset, out->nbytes, file_nbytes)) {
    return unsound(fqn, " reaches beyond file ", from.file);
  }
  return ok_status();
}

// `dims` points to the offsets of the box, followed by its sizes.
Status StoredIndex::to_box(const StoredEntry& entry, const records::Box& from, const int64_t* dims,
                           IndexedBox* out) const {
  const Dims& whole = entry.facts.sizes;
  const auto ndim = static_cast<std::ptrdiff_t>(whole.size());
  out->offsets.assign(dims, dims + ndim);
  out->sizes.assign(dims + ndim, dims + 2 * ndim);
  for (size_t d = 0; d < whole.size(); ++d) {
    if (!range_within(out->offsets[d], out->sizes[d], whole[d])) {
      return unsound("a box of ", entry.facts.fqn, " reaches beyond it");
    }
  }
  StoredPlace place;
  RETURN_IF_ERROR(to_place(entry, from, &place));
  out->file = place.file;
  out->offset = place.offset;
  out->nbytes = place.nbytes;
  out->plain = (from.flags & records::kPlain) != 0;
  out->transforms.clear();
  if (from.transforms.nbytes == 0) return ok_status();
  std::string transforms;
  RETURN_IF_ERROR(text(from.transforms, records::kMaxTransformsNbytes, &transforms));
  for (size_t begin = 0; begin < transforms.size();) {
    const size_t end =
        std::min(transforms.find(records::kTransformSeparator, begin), transforms.size());
    if (end == begin) return unsound("a transform of ", entry.facts.fqn, " has no name");
    out->transforms.push_back(transforms.substr(begin, end - begin));
    begin = end + 1;
  }
  return ok_status();
}

Result<std::vector<IndexedBox>> StoredIndex::boxes(const StoredEntry& entry, int64_t first,
                                                   int64_t last) const {
  std::vector<IndexedBox> out;
  std::vector<records::Box> found;
  std::vector<int64_t> dims;
  const auto ndim = static_cast<int64_t>(entry.facts.sizes.size());
  for (int64_t at = first; at < last;) {
    const int64_t batch = std::min(last - at, kRecordsAtATime);
    found.resize(static_cast<size_t>(batch));
    dims.resize(static_cast<size_t>(batch * 2 * ndim));
    RETURN_IF_ERROR(read_records(records::kBoxSection, entry.first_box + at, found.data(), batch));
    RETURN_IF_ERROR(read_records(records::kDimSection, entry.first_dim + ndim * (1 + 2 * at),
                                 dims.data(), batch * 2 * ndim));
    for (int64_t i = 0; i < batch; ++i) {
      IndexedBox& box = out.emplace_back();
      RETURN_IF_ERROR(
          to_box(entry, found[static_cast<size_t>(i)], dims.data() + i * 2 * ndim, &box));
    }
    at += batch;
  }
  return out;
}

Result<records::Digest> StoredIndex::digest(const StoredEntry& entry, int64_t box) const {
  records::Digest out;
  if (!has_digests()) return out;
  const auto at = static_cast<uint64_t>(entry.first_box + box) * sizeof(out);
  RETURN_IF_ERROR(blocks_->read(static_cast<int64_t>(header_.digests.offset + at),
                                std::as_writable_bytes(std::span(&out, 1))));
  return out;
}

Result<records::Origin> StoredIndex::origin(int64_t number) const {
  records::Origin out = 0;
  if (!has_digests()) return out;
  const auto at = static_cast<uint64_t>(number) * sizeof(out);
  RETURN_IF_ERROR(blocks_->read(static_cast<int64_t>(header_.origins.offset + at),
                                std::as_writable_bytes(std::span(&out, 1))));
  return out;
}

Result<std::vector<StoredPlace>> StoredIndex::places(const StoredEntry& entry) const {
  std::vector<StoredPlace> out;
  std::vector<records::Box> found;
  for (int64_t at = 0; at < entry.box_count;) {
    const int64_t batch = std::min(entry.box_count - at, kRecordsAtATime);
    found.resize(static_cast<size_t>(batch));
    RETURN_IF_ERROR(read_records(records::kBoxSection, entry.first_box + at, found.data(), batch));
    for (const records::Box& box : found) {
      RETURN_IF_ERROR(to_place(entry, box, &out.emplace_back()));
    }
    at += batch;
  }
  return out;
}

// Calls visit(box, offsets, sizes) for every box in order, until it returns false.
template <typename Visit>
Status StoredIndex::visit_dims(const StoredEntry& entry, Visit visit) const {
  const auto ndim = static_cast<int64_t>(entry.facts.sizes.size());
  std::vector<int64_t> dims;
  for (int64_t at = 0; at < entry.box_count;) {
    const int64_t batch = std::min(entry.box_count - at, kRecordsAtATime);
    dims.resize(static_cast<size_t>(batch * 2 * ndim));
    RETURN_IF_ERROR(read_records(records::kDimSection, entry.first_dim + ndim * (1 + 2 * at),
                                 dims.data(), batch * 2 * ndim));
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t* offsets = dims.data() + i * 2 * ndim;
      const int64_t* sizes = offsets + ndim;
      for (int64_t d = 0; d < ndim; ++d) {
        if (!range_within(offsets[d], sizes[d], entry.facts.sizes[static_cast<size_t>(d)])) {
          return unsound("a box of ", entry.facts.fqn, " reaches beyond it");
        }
      }
      if (!visit(at + i, offsets, sizes)) return ok_status();
    }
    at += batch;
  }
  return ok_status();
}

Result<std::optional<int64_t>> StoredIndex::find_box(const StoredEntry& entry, const Dims& offsets,
                                                     std::optional<int64_t> guess) const {
  std::optional<int64_t> number;
  const auto ndim = static_cast<int64_t>(entry.facts.sizes.size());
  if (std::ssize(offsets) != ndim) return number;
  const auto has_elements = [ndim](const int64_t* sizes) {
    return std::find(sizes, sizes + ndim, 0) == sizes + ndim;
  };
  if (guess.has_value() && *guess >= 0 && *guess < entry.box_count) {
    Dims there(2 * offsets.size());
    RETURN_IF_ERROR(read_records(records::kDimSection, entry.first_dim + ndim * (1 + 2 * *guess),
                                 there.data(), 2 * ndim));
    if (std::equal(offsets.begin(), offsets.end(), there.begin()) &&
        has_elements(there.data() + ndim)) {
      return guess;
    }
  }
  RETURN_IF_ERROR(visit_dims(entry, [&](int64_t box, const int64_t* begin, const int64_t* size) {
    if (!std::equal(offsets.begin(), offsets.end(), begin)) return true;
    number = box;
    return !has_elements(size);
  }));
  return number;
}

Result<std::vector<int64_t>> StoredIndex::overlapping(const StoredEntry& entry, const Dims& offsets,
                                                      const Dims& sizes) const {
  const size_t ndim = entry.facts.sizes.size();
  if (offsets.size() != ndim || sizes.size() != ndim) {
    return mismatch(entry.facts.fqn, " has ", ndim, " dimensions, not ", offsets.size());
  }
  std::vector<int64_t> out;
  const auto overlap = [](int64_t a, int64_t a_size, int64_t b, int64_t b_size) {
    return a_size > 0 && b_size > 0 && (a < b ? b - a < a_size : a - b < b_size);
  };
  for (const int64_t offset : offsets) {
    if (offset < 0) return invalid_argument("a box begins at ", offset);
  }
  RETURN_IF_ERROR(visit_dims(entry, [&](int64_t box, const int64_t* begin, const int64_t* size) {
    bool overlaps = true;
    for (size_t d = 0; d < ndim && overlaps; ++d) {
      overlaps = overlap(begin[d], size[d], offsets[d], sizes[d]);
    }
    if (overlaps) out.push_back(box);
    return true;
  }));
  return out;
}

Result<std::vector<uint64_t>> StoredIndex::sums(const StoredFile& file, int64_t first,
                                                int64_t last) const {
  constexpr int64_t kSumsAtATime = CheckedBlocks::kSumsInBlock;
  std::vector<uint64_t> out;
  for (int64_t at = first; at < last;) {
    const int64_t batch = std::min(last - at, kSumsAtATime);
    out.resize(out.size() + static_cast<size_t>(batch));
    RETURN_IF_ERROR(read_records(records::kSumSection, file.first_sum + at,
                                 out.data() + out.size() - batch, batch));
    at += batch;
  }
  return out;
}

Status StoredIndex::check_sums(const StoredFile& file, int64_t first, int64_t last) const {
  return blocks_->check(offset_of(records::kSumSection, file.first_sum + first),
                        (last - first) * static_cast<int64_t>(sizeof(uint64_t)));
}

}  // namespace torch_ckpt
