// Implements the functions of zip_frame.h that read frames and archives.

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/crc.h"
#include "base/strided.h"
#include "format/tensor_pickle.h"
#include "format/zip_directory.h"
#include "format/zip_frame.h"

namespace torch_ckpt {
namespace {

// The first and the last bytes of a slice.
struct Ends {
  Bytes head;
  Bytes tail;
  int64_t nbytes;  // Length of the slice.

  bool in_tail(int64_t offset) const { return offset >= nbytes - ssize(tail); }
  // Requires: [begin, end) lies in the tail, or in the head.
  Bytes bytes(int64_t begin, int64_t end) const {
    if (in_tail(begin)) return slice(tail, begin - (nbytes - ssize(tail)), end - begin);
    return slice(head, begin, end - begin);
  }
};

// The zip directory of a slice, and the records that describe its tensor.
struct Records {
  ZipDirectory directory;
  const ZipEntry* pickle = nullptr;
  const ZipEntry* byte_order = nullptr;  // Null in archives of old versions of torch.save.
  const ZipEntry* payload = nullptr;
  std::string_view payload_key;  // The payload's name is "<root>/data/<key>".

  // Returns the length of the head that `parse_frame` needs.
  int64_t head_nbytes(const Ends& ends) const {
    int64_t needed = 0;
    const auto need = [&](int64_t begin, int64_t end) {
      if (!ends.in_tail(begin)) needed = std::max(needed, end);
    };
    need(pickle->header_offset, pickle->limit);
    if (byte_order != nullptr) need(byte_order->header_offset, byte_order->limit);
    need(payload->header_offset, payload->earliest_data());
    return needed;
  }
};

Result<Records> read_records(Bytes tail, int64_t nbytes) {
  if (ssize(tail) > nbytes || ssize(tail) < std::min(nbytes, kFrameTailNbytes)) {
    return invalid_argument("a tail of ", tail.size(), " bytes for a slice of ", nbytes);
  }
  Records records;
  ASSIGN_OR_RETURN(records.directory, read_zip_directory(tail, nbytes));
  std::string_view root;  // The folder of all records; torch.save chooses its name.
  for (const ZipEntry& entry : records.directory.entries) {
    if (root.empty()) root = entry.name.substr(0, entry.name.find('/') + 1);
    if (root.empty() || !entry.name.starts_with(root)) {
      return corruption("not a stored tensor: its zip archive has more than one folder");
    }
    const std::string_view name = entry.name.substr(root.size());
    if (name == "data.pkl" || name == "byteorder") {
      const ZipEntry*& record = name == "data.pkl" ? records.pickle : records.byte_order;
      if (record != nullptr) return corruption("a stored tensor has two records ", name);
      record = &entry;
    } else if (name.starts_with("data/")) {
      if (records.payload != nullptr) {
        return unsupported("the slice has more than one tensor: torch must read it");
      }
      records.payload = &entry;
      records.payload_key = name.substr(name.find('/') + 1);
    }
  }
  if (records.pickle == nullptr) return corruption("a stored tensor has no record data.pkl");
  if (records.payload == nullptr || records.pickle->nbytes > kMaxParsedPickleNbytes) {
    return unsupported("the slice is not a single tensor: torch must read it");
  }
  return records;
}

// Returns the offset of a record's data, computed from its local header.
// Requires: the ends include the local header, except for its extra fields.
// Errors: kCorruption if the local header contradicts the directory.
Result<int64_t> data_offset(const Ends& ends, const ZipEntry& entry) {
  const Bytes local = ends.bytes(entry.header_offset, entry.earliest_data());
  const int64_t name_nbytes = load_le<uint16_t>(local.data() + 26);
  const int64_t extra_nbytes = load_le<uint16_t>(local.data() + 28);
  const int64_t offset = entry.earliest_data() + extra_nbytes;
  // The directory determines the end of the data. A local header with another end is damaged.
  if (load_le<uint32_t>(local.data()) != kZipLocalSignature ||
      name_nbytes != static_cast<int64_t>(entry.name.size()) ||
      as_text(local.subspan(static_cast<size_t>(kZipLocalNbytes))) != entry.name ||
      entry.limit - offset - entry.nbytes != entry.descriptor_nbytes()) {
    return corruption("the header of record ", entry.name, " contradicts the zip directory");
  }
  return offset;
}

// Returns the data of a record. Requires: the ends include the whole record.
Result<Bytes> record_data(const Ends& ends, const ZipEntry& entry) {
  ASSIGN_OR_RETURN(const int64_t offset, data_offset(ends, entry));
  const Bytes data = ends.bytes(offset, offset + entry.nbytes);
  // torch.save writes 0 if its checksums are disabled.
  if (entry.crc != 0 && crc32(0, data) != entry.crc) {
    return corruption("record ", entry.name, " fails its checksum");
  }
  return data;
}

// Sets offset and strides of a tensor without elements to those of a contiguous tensor.
Status place_empty(StoredTensor& tensor) {
  int64_t extent = itemsize(tensor.dtype);
  for (const int64_t size : tensor.sizes) {
    const auto next = checked_mul(extent, std::max<int64_t>(size, 1));
    if (!next) return corruption("a tensor has too large sizes: ", to_string(tensor.sizes));
    extent = *next;
  }
  tensor.strides = contiguous_strides(tensor.sizes);
  tensor.storage_offset = 0;
  return ok_status();
}

// Checks the byte order record. Errors: kUnsupported for big-endian elements; kCorruption.
Status check_byte_order(const Ends& ends, const ZipEntry& entry) {
  ASSIGN_OR_RETURN(const Bytes data, record_data(ends, entry));
  if (as_text(data) == "little") return ok_status();
  if (as_text(data) == "big") return unsupported("the tensor is stored in big-endian byte order");
  return corruption("a stored tensor has an unknown byte order");
}

bool has_zip_signature(Bytes bytes) {
  const auto is_signed = [bytes](int64_t offset, uint32_t signature) {
    return range_within(offset, 4, ssize(bytes)) &&
           load_le<uint32_t>(bytes.data() + offset) == signature;
  };
  return is_signed(0, kZipLocalSignature) ||
         is_signed(ssize(bytes) - kZipEndNbytes, kZipEndSignature);
}

}  // namespace

Status check_elements(StoredTensor& tensor) {
  if (std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) != tensor.sizes.end()) {
    return place_empty(tensor);
  }
  const int64_t size = itemsize(tensor.dtype);
  std::optional<int64_t> last = tensor.storage_offset;
  bool fits = true;
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    // The stride in bytes must not overflow, even for a dimension of size 1.
    fits = fits && checked_mul(tensor.strides[d], size).has_value();
    const auto reach = checked_mul(tensor.sizes[d] - 1, tensor.strides[d]);
    last = last && reach ? checked_add(*last, *reach) : std::nullopt;
  }
  if (fits && last && *last < tensor.payload_nbytes / size) return ok_status();
  return corruption("a tensor of sizes ", to_string(tensor.sizes), ", strides ",
                    to_string(tensor.strides), " and offset ", tensor.storage_offset,
                    " reaches beyond its storage of ", tensor.payload_nbytes, " bytes");
}

Status verify_archive(Bytes archive, bool strict) {
  if (!has_zip_signature(archive)) return ok_status();
  const Result<ZipDirectory> directory = read_zip_directory(archive, ssize(archive));
  if (directory.status().code() == StatusCode::kUnsupported) return ok_status();
  if (!directory.ok()) return strict ? directory.status() : ok_status();
  const auto is_pickle = [](const ZipEntry& entry) { return entry.name.ends_with("/data.pkl"); };
  const bool has_pickle =
      std::any_of(directory->entries.begin(), directory->entries.end(), is_pickle);
  if (!has_pickle && !strict) return ok_status();
  const Ends ends{archive, archive, ssize(archive)};
  for (const ZipEntry& entry : directory->entries) {
    const Result<Bytes> data = record_data(ends, entry);
    if (!data.ok()) return data.status();
  }
  return ok_status();
}

Result<int64_t> frame_head_nbytes(Bytes tail, int64_t nbytes) {
  ASSIGN_OR_RETURN(const Records records, read_records(tail, nbytes));
  return records.head_nbytes({{}, tail, nbytes});
}

Result<StoredTensor> parse_frame(Bytes head, Bytes tail, int64_t nbytes) {
  const Ends ends{head, tail, nbytes};
  ASSIGN_OR_RETURN(const Records records, read_records(tail, nbytes));
  if (records.head_nbytes(ends) > ssize(head)) {
    return unsupported("the frame is longer than the ", head.size(), " bytes that were read of it");
  }
  if (records.byte_order != nullptr) {
    RETURN_IF_ERROR(check_byte_order(ends, *records.byte_order));
  }
  ASSIGN_OR_RETURN(const Bytes pickle, record_data(ends, *records.pickle));
  ASSIGN_OR_RETURN(PickledTensor pickled, parse_tensor_pickle(pickle));
  if (pickled.storage_key != records.payload_key ||
      pickled.storage_nbytes != records.payload->nbytes) {
    return corruption("record ", records.payload->name, " of ", records.payload->nbytes,
                      " bytes is not the storage \"", pickled.storage_key, "\" of ",
                      pickled.storage_nbytes, " bytes that the tensor needs");
  }

  StoredTensor tensor;
  ASSIGN_OR_RETURN(tensor.payload_offset, data_offset(ends, *records.payload));
  tensor.payload_nbytes = records.payload->nbytes;
  tensor.payload_crc = records.payload->crc;
  tensor.dtype = pickled.dtype;
  tensor.sizes = std::move(pickled.sizes);
  tensor.strides = std::move(pickled.strides);
  tensor.storage_offset = pickled.storage_offset;
  RETURN_IF_ERROR(check_elements(tensor));
  return tensor;
}

}  // namespace torch_ckpt
