#include "format/zip_directory.h"

#include <algorithm>

namespace torch_ckpt {
namespace {

// Reads consecutive little-endian fields. Requires: `bytes` includes all of them.
class Fields {
 public:
  explicit Fields(Bytes bytes) : at_(bytes.data()) {}

  uint16_t u16() { return next<uint16_t>(); }
  uint32_t u32() { return next<uint32_t>(); }
  uint64_t u64() { return next<uint64_t>(); }
  void skip(int64_t nbytes) { at_ += nbytes; }

 private:
  template <typename T>
  T next() {
    const T value = load_le<T>(at_);
    at_ += sizeof(T);
    return value;
  }

  const std::byte* at_;
};

Status no_archive(std::string_view why) {
  return corruption("not an archive of torch.save: ", why);
}

// Fields of the end record. The unsigned values are unchecked.
struct End {
  uint64_t count = 0;   // Number of entries in the directory.
  uint64_t nbytes = 0;  // Length of the directory.
  uint64_t offset = 0;  // Offset of the directory.
  int64_t limit = 0;    // Offset of the end record.
};

Result<End> read_zip64_end(Bytes tail, int64_t nbytes) {
  const int64_t behind = kZipEndNbytes + kZip64LocatorNbytes;
  const int64_t length = behind + kZip64EndNbytes;
  if (ssize(tail) < length) return no_archive("its zip64 end record is missing");
  Fields locator(slice(tail, ssize(tail) - behind, kZip64LocatorNbytes));
  if (locator.u32() != kZip64LocatorSignature) return no_archive("its zip64 locator is missing");
  locator.skip(4);
  End end{.limit = nbytes - length};
  if (locator.u64() != static_cast<uint64_t>(end.limit)) {
    return no_archive("its zip64 end record is misplaced");
  }
  Fields fields(slice(tail, ssize(tail) - length, kZip64EndNbytes));
  if (fields.u32() != kZip64EndSignature) return no_archive("its zip64 end record is missing");
  fields.skip(8 + 2 + 2 + 4 + 4 + 8);
  end.count = fields.u64();
  end.nbytes = fields.u64();
  end.offset = fields.u64();
  return end;
}

Result<End> read_end_record(Bytes tail, int64_t nbytes) {
  if (ssize(tail) < kZipEndNbytes) return no_archive("it is too short for a zip archive");
  Fields fields(slice(tail, ssize(tail) - kZipEndNbytes, kZipEndNbytes));
  if (fields.u32() != kZipEndSignature) return no_archive("no zip archive ends there");
  End end{.limit = nbytes - kZipEndNbytes};
  const uint16_t disk = fields.u16();
  const uint16_t directory_disk = fields.u16();
  const uint16_t count_on_disk = fields.u16();
  end.count = fields.u16();
  end.nbytes = fields.u32();
  end.offset = fields.u32();
  if (end.count == 0xFFFF || end.nbytes == kZip32Limit || end.offset == kZip32Limit) {
    return read_zip64_end(tail, nbytes);
  }
  if (disk != 0 || directory_disk != 0 || count_on_disk != end.count) {
    return no_archive("its zip archive spans disks");
  }
  // Torch reads the zip64 end record wherever there is a locator, so both must state the same.
  const int64_t locator = ssize(tail) - kZipEndNbytes - kZip64LocatorNbytes;
  if (locator >= 0 &&
      Fields(slice(tail, locator, kZip64LocatorNbytes)).u32() == kZip64LocatorSignature) {
    ASSIGN_OR_RETURN(const End zip64, read_zip64_end(tail, nbytes));
    if (zip64.count != end.count || zip64.nbytes != end.nbytes || zip64.offset != end.offset) {
      return no_archive("its two end records contradict each other");
    }
    return zip64;
  }
  return end;
}

Result<End> read_end(Bytes tail, int64_t nbytes) {
  ASSIGN_OR_RETURN(const End end, read_end_record(tail, nbytes));
  if (end.nbytes > static_cast<uint64_t>(end.limit) ||
      end.offset > static_cast<uint64_t>(end.limit) - end.nbytes) {
    return no_archive("its zip directory lies outside it");
  }
  return end;
}

// Replaces saturated values by those in the zip64 extra field. The extra field has only the
// saturated values, in the order of the parameters.
Status widen(Bytes extra, uint64_t* nbytes, uint64_t* stored_nbytes, uint64_t* header_offset) {
  while (ssize(extra) >= kZipExtraHeaderNbytes) {
    Fields header(extra);
    const uint16_t tag = header.u16();
    const int64_t length = header.u16();
    if (length > ssize(extra) - kZipExtraHeaderNbytes) break;
    Bytes body = slice(extra, kZipExtraHeaderNbytes, length);
    extra = extra.subspan(static_cast<size_t>(kZipExtraHeaderNbytes + length));
    if (tag != kZip64ExtraTag) continue;
    for (uint64_t* field : {nbytes, stored_nbytes, header_offset}) {
      if (*field != kZip32Limit) continue;
      if (body.size() < sizeof(uint64_t)) return no_archive("a zip64 field is cut off");
      *field = load_le<uint64_t>(body.data());
      body = body.subspan(sizeof(uint64_t));
    }
    return ok_status();
  }
  return no_archive("a zip64 field is missing");
}

constexpr uint32_t kFolderAttribute = 0x10;

// Parses the first entry of `directory` and removes its bytes.
Result<ZipEntry> read_entry(Bytes* directory) {
  if (ssize(*directory) < kZipEntryNbytes) return no_archive("its zip directory is cut off");
  Fields fields(*directory);
  if (fields.u32() != kZipEntrySignature) return no_archive("its zip directory is broken");
  fields.skip(2 + 2);
  const uint16_t flags = fields.u16();
  const uint16_t method = fields.u16();
  fields.skip(2 + 2);
  ZipEntry entry;
  entry.crc = fields.u32();
  uint64_t stored_nbytes = fields.u32();
  uint64_t nbytes = fields.u32();
  const int64_t name_nbytes = fields.u16();
  const int64_t extra_nbytes = fields.u16();
  const int64_t comment_nbytes = fields.u16();
  fields.skip(2 + 2);
  const uint32_t attributes = fields.u32();
  uint64_t header_offset = fields.u32();
  const int64_t total = kZipEntryNbytes + name_nbytes + extra_nbytes + comment_nbytes;
  if (ssize(*directory) < total) return no_archive("its zip directory is cut off");
  entry.name = as_text(slice(*directory, kZipEntryNbytes, name_nbytes));
  const Bytes extra = slice(*directory, kZipEntryNbytes + name_nbytes, extra_nbytes);
  *directory = directory->subspan(static_cast<size_t>(total));

  if (stored_nbytes == kZip32Limit || nbytes == kZip32Limit || header_offset == kZip32Limit) {
    RETURN_IF_ERROR(widen(extra, &nbytes, &stored_nbytes, &header_offset));
  }
  // torch.save never compresses, and compressed data rarely has the size of its contents. So this
  // is a stored record with a damaged method, whose bytes torch would inflate without an error.
  if (method != 0 && nbytes == stored_nbytes) {
    return no_archive("a record is marked as compressed, but has the size of its contents");
  }
  if ((flags & 1) != 0 || method != 0) {
    return unsupported("a record of the zip archive is compressed or encrypted");
  }
  if (nbytes > 0 && (attributes & kFolderAttribute) != 0) {
    return no_archive("a record with contents is marked as a folder");
  }
  if (nbytes != stored_nbytes) return no_archive("the sizes of a record contradict each other");
  if (nbytes > INT64_MAX || header_offset > INT64_MAX) return no_archive("a record is too large");
  entry.has_descriptor = (flags & kZipDescriptorFlag) != 0;
  entry.nbytes = static_cast<int64_t>(nbytes);
  entry.header_offset = static_cast<int64_t>(header_offset);
  return entry;
}

}  // namespace

Result<int64_t> zip_directory_offset(Bytes tail, int64_t nbytes) {
  ASSIGN_OR_RETURN(const End end, read_end(tail, nbytes));
  return static_cast<int64_t>(end.offset);
}

Result<ZipDirectory> read_zip_directory(Bytes tail, int64_t nbytes) {
  ASSIGN_OR_RETURN(const End end, read_end(tail, nbytes));
  ZipDirectory directory;
  directory.offset = static_cast<int64_t>(end.offset);
  const int64_t tail_offset = nbytes - ssize(tail);
  if (directory.offset < tail_offset) {
    return unsupported("the zip directory is larger than that of one tensor");
  }
  Bytes rest = slice(tail, directory.offset - tail_offset, static_cast<int64_t>(end.nbytes));
  if (end.count > end.nbytes / kZipEntryNbytes) return no_archive("its zip directory is cut off");
  directory.entries.reserve(static_cast<size_t>(end.count));
  for (uint64_t i = 0; i < end.count; ++i) {
    ASSIGN_OR_RETURN(const ZipEntry entry, read_entry(&rest));
    directory.entries.push_back(entry);
  }
  if (!rest.empty()) return no_archive("its zip directory is longer than its entries");

  std::sort(directory.entries.begin(), directory.entries.end(),
            [](const ZipEntry& a, const ZipEntry& b) { return a.header_offset < b.header_offset; });
  int64_t limit = directory.offset;
  for (auto entry = directory.entries.rbegin(); entry != directory.entries.rend(); ++entry) {
    const auto length =
        checked_add(entry->nbytes, kZipLocalNbytes + static_cast<int64_t>(entry->name.size()));
    if (!length || !range_within(entry->header_offset, *length, limit)) {
      return no_archive("two records overlap");
    }
    entry->limit = limit;
    limit = entry->header_offset;
  }
  return directory;
}

}  // namespace torch_ckpt
