#pragma once

// Parses the directory of a zip archive, which lists its records, from the archive's last bytes.
//
// Supports the archives that torch.save and `zip_frame` write: no archive comment, one disk, and
// zip64 if the sizes require it. Called by `zip_frame`, and by engine/load/archive_records for
// whole files.

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Signatures and lengths of the records of a zip archive, in the order of the archive.
inline constexpr uint32_t kZipLocalSignature = 0x04034B50;
inline constexpr int64_t kZipLocalNbytes = 30;  // Without the name and the extra fields.
inline constexpr uint32_t kZipDescriptorSignature = 0x08074B50;
inline constexpr int64_t kZipDescriptorNbytes = 16;
inline constexpr int64_t kZip64DescriptorNbytes = 24;
inline constexpr uint32_t kZipEntrySignature = 0x02014B50;
inline constexpr int64_t kZipEntryNbytes = 46;  // Without the name and the extra fields.
inline constexpr uint32_t kZip64EndSignature = 0x06064B50;
inline constexpr int64_t kZip64EndNbytes = 56;
inline constexpr uint32_t kZip64LocatorSignature = 0x07064B50;
inline constexpr int64_t kZip64LocatorNbytes = 20;
inline constexpr uint32_t kZipEndSignature = 0x06054B50;
inline constexpr int64_t kZipEndNbytes = 22;

// A 32-bit size or offset with this value means that the zip64 field has the actual value.
inline constexpr int64_t kZip32Limit = 0xFFFFFFFF;

inline constexpr uint16_t kZip64ExtraTag = 1;
inline constexpr int64_t kZipExtraHeaderNbytes = 4;  // Tag and length.

inline constexpr uint16_t kZipUtf8Flag = 0x0800;
inline constexpr uint16_t kZipDescriptorFlag = 0x0008;  // CRC and sizes follow the data.

// One record. Offsets are relative to the start of the archive.
struct ZipEntry {
  std::string_view name;  // Points into the bytes the directory was read from.
  uint32_t crc = 0;
  int64_t nbytes = 0;
  int64_t header_offset = 0;
  bool has_descriptor = false;
  int64_t limit = 0;  // Offset of the next header or of the directory.

  // Returns a lower bound of the data's offset. The directory does not state the length of the
  // extra fields in the local header.
  int64_t earliest_data() const {
    return header_offset + kZipLocalNbytes + static_cast<int64_t>(name.size());
  }

  // Returns the length of the data descriptor between the data and `limit`.
  int64_t descriptor_nbytes() const {
    if (!has_descriptor) return 0;
    const bool zip64 = nbytes >= kZip32Limit || header_offset >= kZip32Limit;
    return zip64 ? kZip64DescriptorNbytes : kZipDescriptorNbytes;
  }
};

struct ZipDirectory {
  std::vector<ZipEntry> entries;  // By header_offset, ascending.
  int64_t offset = 0;             // Offset of the directory in the archive.
};

// Returns the offset of the directory of an archive of `nbytes` bytes. `tail` is the end of the
// archive: at least kZipEndsNbytes bytes, or the whole archive. Errors: kCorruption for bytes that
// are no such archive.
inline constexpr int64_t kZipEndsNbytes = kZipEndNbytes + kZip64LocatorNbytes + kZip64EndNbytes;
Result<int64_t> zip_directory_offset(Bytes tail, int64_t nbytes);

// Parses the directory of an archive of `nbytes` bytes from its last bytes. Every returned entry is
// uncompressed, and its header and data fit between its offset and its limit.
// Requires: tail.size() <= nbytes. Errors: kCorruption for bytes that are no such archive;
// kUnsupported for a compressed or encrypted archive, or a directory that begins before `tail`.
Result<ZipDirectory> read_zip_directory(Bytes tail, int64_t nbytes);

}  // namespace torch_ckpt
