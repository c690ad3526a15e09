#pragma once

// The directory of a zip archive, which lists its records, read from the archive's last bytes.
//
// Only what torch.save and `zip_frame` write: no comment behind the archive, no spanned disks;
// zip64 where the sizes ask for it. Called by `zip_frame`, and by
// `engine/archive_records` for whole files.

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Lengths and signatures of the parts of a zip archive, in the order they appear.
inline constexpr uint32_t kZipLocalSignature = 0x04034B50;
inline constexpr int64_t kZipLocalNbytes = 30;  // Then the name and the extra fields.
inline constexpr uint32_t kZipDescriptorSignature = 0x08074B50;
inline constexpr int64_t kZipDescriptorNbytes = 16;
inline constexpr int64_t kZip64DescriptorNbytes = 24;
inline constexpr uint32_t kZipEntrySignature = 0x02014B50;
inline constexpr int64_t kZipEntryNbytes = 46;  // Then the name and the extra fields.
inline constexpr uint32_t kZip64EndSignature = 0x06064B50;
inline constexpr int64_t kZip64EndNbytes = 56;
inline constexpr uint32_t kZip64LocatorSignature = 0x07064B50;
inline constexpr int64_t kZip64LocatorNbytes = 20;
inline constexpr uint32_t kZipEndSignature = 0x06054B50;
inline constexpr int64_t kZipEndNbytes = 22;

// A 32-bit size or offset of this value stands in the zip64 field instead.
inline constexpr int64_t kZip32Limit = 0xFFFFFFFF;

inline constexpr uint16_t kZip64ExtraTag = 1;
inline constexpr int64_t kZipExtraHeaderNbytes = 4;  // Tag and length.

inline constexpr uint16_t kZipUtf8Flag = 0x0800;
inline constexpr uint16_t kZipDescriptorFlag = 0x0008;  // CRC and sizes follow the data.

// One record. Offsets are from the start of the archive.
struct ZipEntry {
  std::string_view name;  // Points into the bytes the directory was read from.
  uint32_t crc = 0;
  int64_t nbytes = 0;
  int64_t header_offset = 0;
  bool has_descriptor = false;
  int64_t limit = 0;  // Where the next header begins, or the directory.

  // Where the data lies at the earliest. What follows the name in the local header is not in the
  // directory.
  int64_t earliest_data() const {
    return header_offset + kZipLocalNbytes + static_cast<int64_t>(name.size());
  }

  // What lies between the data and `limit`.
  int64_t descriptor_nbytes() const {
    if (!has_descriptor) return 0;
    const bool zip64 = nbytes >= kZip32Limit || header_offset >= kZip32Limit;
    return zip64 ? kZip64DescriptorNbytes : kZipDescriptorNbytes;
  }
};

struct ZipDirectory {
  std::vector<ZipEntry> entries;  // By header_offset, ascending.
  int64_t offset = 0;             // Where the directory begins.
};

// Where the directory of an archive of `nbytes` bytes begins, read from its last bytes: at least
// kZipEndsNbytes of them, or all. Errors: kCorruption for bytes that are no such archive.
inline constexpr int64_t kZipEndsNbytes = kZipEndNbytes + kZip64LocatorNbytes + kZip64EndNbytes;
Result<int64_t> zip_directory_offset(Bytes tail, int64_t nbytes);

// Reads the directory of an archive of `nbytes` bytes from its last bytes. Every entry it returns
// is uncompressed and fits, header and data, between its offset and its limit. Requires:
// tail.size() <= nbytes. Errors: kCorruption for bytes that are no such archive; kUnsupported for
// one that is compressed or encrypted, or whose directory begins before `tail`.
Result<ZipDirectory> read_zip_directory(Bytes tail, int64_t nbytes);

}  // namespace torch_ckpt
