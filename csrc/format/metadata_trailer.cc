#include "format/metadata_trailer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace torch_ckpt {
namespace {

constexpr std::array<char, 8> kTrailerMagic = {'T', 'C', 'K', 'P', 'T', 'E', 'N', 'D'};
constexpr uint32_t kTrailerVersion = 1;

struct Record {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t zero;
  std::array<char, kSaveIdNbytes> save_id;
  uint64_t pickle_nbytes;
  uint64_t pickle_sum;
  uint64_t term;
  uint64_t sum;  // XXH3 of the bytes before this field.
};
static_assert(sizeof(Record) == kMetadataTrailerNbytes);

uint64_t trailer_sum(Bytes trailer) { return xxh3(trailer.first(offsetof(Record, sum))); }

}  // namespace

Result<std::array<std::byte, kMetadataTrailerNbytes>> write_metadata_trailer(
    const MetadataTrailer& trailer) {
  if (static_cast<int64_t>(trailer.save_id.size()) != kSaveIdNbytes) {
    return invalid_argument("a save id has ", kSaveIdNbytes, " characters, not ",
                            trailer.save_id.size());
  }
  Record record = {};
  record.magic = kTrailerMagic;
  record.version = kTrailerVersion;
  std::copy(trailer.save_id.begin(), trailer.save_id.end(), record.save_id.begin());
  record.pickle_nbytes = static_cast<uint64_t>(trailer.pickle.nbytes);
  record.pickle_sum = trailer.pickle.sum;
  record.term = trailer.term;
  std::array<std::byte, kMetadataTrailerNbytes> bytes;
  std::memcpy(bytes.data(), &record, sizeof(record));
  record.sum = trailer_sum(bytes);
  std::memcpy(bytes.data(), &record, sizeof(record));
  return bytes;
}

Result<MetadataTrailer> parse_metadata_trailer(Bytes last, int64_t file_nbytes) {
  Record record;
  if (last.size() != sizeof(record)) return corruption("it is too short for a trailer");
  std::memcpy(&record, last.data(), sizeof(record));
  if (record.magic != kTrailerMagic) return corruption("it does not end with a trailer");
  if (record.sum != trailer_sum(last)) return corruption("its trailer fails its checksum");
  if (record.version != kTrailerVersion) {
    return unsupported("its trailer has version ", record.version, "; this build reads ",
                       kTrailerVersion);
  }
  if (std::cmp_not_equal(record.pickle_nbytes, file_nbytes - kMetadataTrailerNbytes)) {
    return corruption("it is ", file_nbytes, " bytes long, and its trailer follows a pickle of ",
                      record.pickle_nbytes);
  }
  MetadataTrailer out;
  out.save_id.assign(record.save_id.data(), record.save_id.size());
  out.pickle = {static_cast<int64_t>(record.pickle_nbytes), record.pickle_sum};
  out.term = record.term;
  return out;
}

}  // namespace torch_ckpt
