#include "engine/load/archive_records.h"

#include <algorithm>
#include <cerrno>
#include <exception>

#include "base/bytes.h"
#include "format/zip_directory.h"

namespace torch_ckpt {
namespace {

// Bounds the allocation for a damaged file. A million storages need less than a tenth of it.
constexpr int64_t kMaxDirectoryNbytes = int64_t{1} << 30;

Result<std::vector<std::byte>> read_from(File& file, int64_t offset, int64_t end) {
  std::vector<std::byte> bytes;
  try {
    bytes.resize(static_cast<size_t>(end - offset));
  } catch (const std::exception&) {
    return errno_status(ENOMEM, str_cat("cannot read ", end - offset, " bytes of ", file.path()));
  }
  if (!bytes.empty()) RETURN_IF_ERROR(file.read(offset, bytes));
  return bytes;
}

// The data of a record ends at its descriptor, which ends where the next record begins.
Result<ArchiveRecord> to_record(const ZipEntry& entry) {
  ArchiveRecord out{std::string(entry.name), 0, entry.nbytes, entry.crc};
  out.offset = entry.limit - entry.descriptor_nbytes() - entry.nbytes;
  if (out.offset < entry.earliest_data()) {
    return corruption("record ", out.name, " has no room for its descriptor");
  }
  return out;
}

Result<Archive> read_directory(File& file) {
  Archive out;
  ASSIGN_OR_RETURN(out.nbytes, file.size());
  const int64_t end = std::max<int64_t>(out.nbytes - kZipEndsNbytes, 0);
  ASSIGN_OR_RETURN(const auto ends, read_from(file, end, out.nbytes));
  ASSIGN_OR_RETURN(const int64_t offset, zip_directory_offset(ends, out.nbytes));
  if (out.nbytes - offset > kMaxDirectoryNbytes) {
    return corruption("its zip directory is ", out.nbytes - offset, " bytes long");
  }
  ASSIGN_OR_RETURN(const auto tail, read_from(file, std::min(offset, end), out.nbytes));
  ASSIGN_OR_RETURN(const ZipDirectory directory, read_zip_directory(tail, out.nbytes));
  out.records.reserve(directory.entries.size());
  for (const ZipEntry& entry : directory.entries) {
    ASSIGN_OR_RETURN(ArchiveRecord record, to_record(entry));
    out.records.push_back(std::move(record));
  }
  return out;
}

}  // namespace

Result<Archive> read_archive(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const auto file, fs.open(path, OpenMode::kRead, Caching::kBuffered));
  Result<Archive> out = read_directory(*file);
  const StatusCode code = out.status().code();
  if (code == StatusCode::kCorruption || code == StatusCode::kUnsupported) {
    return Status(code, str_cat("cannot read ", path, ": ", out.status().message()));
  }
  return out;
}

}  // namespace torch_ckpt
