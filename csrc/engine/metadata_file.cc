#include "engine/metadata_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "base/xxh3.h"

namespace torch_ckpt {
namespace {

// Bounds the allocation for a damaged file that is mostly a hole.
constexpr int64_t kMaxNbytes = int64_t{8} << 30;

}  // namespace

Result<std::shared_ptr<MetadataFile>> MetadataFile::open(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(auto file, fs.open(path, OpenMode::kRead, Caching::kBuffered));
  std::shared_ptr<MetadataFile> out(new MetadataFile(std::move(file)));
  ASSIGN_OR_RETURN(out->nbytes_, out->file_->size());
  std::vector<std::byte> last(static_cast<size_t>(std::min(out->nbytes_, kMetadataTrailerNbytes)));
  if (!last.empty()) RETURN_IF_ERROR(out->file_->read(out->nbytes_ - ssize(last), last));
  const Result<MetadataTrailer> trailer = parse_metadata_trailer(last, out->nbytes_);
  if (trailer.ok()) out->trailer_ = *trailer;
  out->trailer_status_ = trailer.status();
  return out;
}

Status MetadataFile::wrong_sum() const {
  return corruption("cannot read ", path(), ": the ", trailer_->pickle.nbytes,
                    " bytes of its pickle fail their checksum");
}

Result<std::vector<std::byte>> MetadataFile::read_pickle(bool verify) const {
  if (nbytes_ > kMaxNbytes) {
    return corruption("cannot read ", path(), ": it has ", nbytes_, " bytes, more than ",
                      kMaxNbytes);
  }
  std::vector<std::byte> bytes;
  try {
    bytes.resize(static_cast<size_t>(trailer_ ? trailer_->pickle.nbytes : nbytes_));
  } catch (const std::exception&) {  // A damaged file can have any size.
    return errno_status(ENOMEM, str_cat("cannot read ", nbytes_, " bytes of ", path()));
  }
  if (!bytes.empty()) RETURN_IF_ERROR(file_->read(0, bytes));
  if (trailer_ && verify && xxh3(bytes) != trailer_->pickle.sum) return wrong_sum();
  return bytes;
}

Status MetadataFile::check_pickle() const {
  if (!trailer_) {
    return Status(trailer_status_.code(),
                  str_cat("cannot check ", path(), ": ", trailer_status_.message()));
  }
  constexpr int64_t kBufferNbytes = int64_t{1} << 20;
  std::vector<std::byte> buffer(static_cast<size_t>(kBufferNbytes));
  Xxh3Stream sum;
  for (int64_t at = 0; at < trailer_->pickle.nbytes; at += kBufferNbytes) {
    const MutableBytes chunk =
        slice(MutableBytes(buffer), 0, std::min(kBufferNbytes, trailer_->pickle.nbytes - at));
    RETURN_IF_ERROR(file_->read(at, chunk));
    sum.update(chunk);
  }
  return sum.finish() == trailer_->pickle.sum ? ok_status() : wrong_sum();
}

}  // namespace torch_ckpt
