#include "format/zip_frame.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/crc.h"
#include "base/strided.h"
#include "format/tensor_pickle.h"
#include "format/zip_directory.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kPickleName = "archive/data.pkl";
constexpr std::string_view kByteOrderName = "archive/byteorder";
constexpr std::string_view kVersionName = "archive/version";
constexpr std::string_view kPayloadName = "archive/data/0";
constexpr std::string_view kByteOrder = "little";
constexpr std::string_view kVersionText = "3\n";
constexpr uint32_t kByteOrderCrc = 0x19E33D85;
constexpr uint32_t kVersionCrc = 0x55679ED1;

constexpr uint16_t kPlainVersion = 20;
constexpr uint16_t kZip64Version = 45;
constexpr uint16_t kFirstOfJanuary1980 = 0x0021;  // The earliest date that zip can represent.

// The padding extra field, as torch.save writes it.
constexpr uint16_t kPaddingTag = 0x4246;  // "FB"
constexpr auto kPaddingByte = static_cast<std::byte>('Z');

// Length of the zip64 extra field of a payload too large for 32 bits: the size, twice.
constexpr int64_t kZip64ExtraNbytes = kZipExtraHeaderNbytes + 16;

constexpr int64_t kEntryCount = 4;

constexpr int64_t nbytes_of(std::string_view text) { return static_cast<int64_t>(text.size()); }

// Writes consecutive little-endian fields. Requires: `out` has space for all of them.
class FieldWriter {
 public:
  explicit FieldWriter(MutableBytes out) : begin_(out.data()), at_(out.data()) {}

  int64_t nbytes() const { return at_ - begin_; }

  void u16(int64_t value) { put(static_cast<uint16_t>(value)); }
  void u32(int64_t value) { put(static_cast<uint32_t>(value)); }
  void u64(int64_t value) { put(static_cast<uint64_t>(value)); }
  void text(std::string_view value) {
    std::memcpy(at_, value.data(), value.size());
    at_ += value.size();
  }
  void fill(std::byte value, int64_t count) {
    std::fill_n(at_, count, value);
    at_ += count;
  }
  void skip(int64_t count) { at_ += count; }

 private:
  template <typename T>
  void put(T value) {
    store_le(at_, value);
    at_ += sizeof(T);
  }

  std::byte* begin_;
  std::byte* at_;
};

bool is_zip64(int64_t payload_nbytes) { return payload_nbytes >= kZip32Limit; }

// The fields that a local header and a directory entry have in common: from "version needed" to the
// length of the name.
struct HeaderFields {
  std::string_view name;
  uint32_t crc = 0;
  int64_t nbytes = 0;
  uint16_t flags = kZipUtf8Flag;

  void write(FieldWriter& out) const {
    const int64_t size = std::min(nbytes, kZip32Limit);
    out.u16(is_zip64(nbytes) ? kZip64Version : kPlainVersion);
    out.u16(flags);
    out.u16(0);  // Stored, not compressed.
    out.u16(0);  // Midnight.
    out.u16(kFirstOfJanuary1980);
    out.u32(crc);
    out.u32(size);
    out.u32(size);
    out.u16(nbytes_of(name));
  }
};

void write_zip64_extra(FieldWriter& out, int64_t payload_nbytes) {
  out.u16(kZip64ExtraTag);
  out.u16(kZip64ExtraNbytes - kZipExtraHeaderNbytes);
  out.u64(payload_nbytes);  // Size.
  out.u64(payload_nbytes);  // Stored size.
}

void write_local(FieldWriter& out, const HeaderFields& fields, int64_t extra_nbytes) {
  out.u32(kZipLocalSignature);
  fields.write(out);
  out.u16(extra_nbytes);
  out.text(fields.name);
}

void write_entry(FieldWriter& out, const HeaderFields& fields, int64_t header_offset) {
  const bool zip64 = is_zip64(fields.nbytes);
  out.u32(kZipEntrySignature);
  out.u16(kZip64Version);  // Made by.
  fields.write(out);
  out.u16(zip64 ? kZip64ExtraNbytes : 0);
  out.u16(0);  // No comment.
  out.u16(0);  // First disk.
  out.u16(0);  // No internal attributes.
  out.u32(0);  // No external attributes.
  out.u32(header_offset);
  out.text(fields.name);
  if (zip64) write_zip64_extra(out, fields.nbytes);
}

// Offsets in the head, computed from the lengths of pickle and payload.
struct FrameMap {
  FrameMap(int64_t pickle_nbytes, int64_t payload_nbytes) {
    pickle_data = kZipLocalNbytes + nbytes_of(kPickleName);
    byte_order = pickle_data + pickle_nbytes;
    version = byte_order + kZipLocalNbytes + nbytes_of(kByteOrderName) + nbytes_of(kByteOrder);
    payload_header = version + kZipLocalNbytes + nbytes_of(kVersionName) + nbytes_of(kVersionText);
    const int64_t unpadded = payload_header + kZipLocalNbytes + nbytes_of(kPayloadName) +
                             (is_zip64(payload_nbytes) ? kZip64ExtraNbytes : 0);
    payload = align_up(unpadded, kFrameAlignment);
    // The padding field needs space for its own header.
    if (payload != unpadded && payload - unpadded < kZipExtraHeaderNbytes) {
      payload += kFrameAlignment;
    }
    padding_nbytes = payload - unpadded;
  }

  int64_t pickle_data;
  int64_t byte_order;
  int64_t version;
  int64_t payload_header;
  int64_t payload;
  int64_t padding_nbytes;
};

// Offsets in the tail, relative to the start of the slice.
struct TailMap {
  TailMap(int64_t payload_end, bool zip64_payload) {
    constexpr int64_t kEntries = kEntryCount * kZipEntryNbytes + nbytes_of(kPickleName) +
                                 nbytes_of(kByteOrderName) + nbytes_of(kVersionName) +
                                 nbytes_of(kPayloadName);
    directory = payload_end + (zip64_payload ? kZip64DescriptorNbytes : kZipDescriptorNbytes);
    directory_nbytes = kEntries + (zip64_payload ? kZip64ExtraNbytes : 0);
    zip64 = directory >= kZip32Limit;
    end = directory + directory_nbytes + (zip64 ? kZip64EndNbytes + kZip64LocatorNbytes : 0) +
          kZipEndNbytes;
  }

  int64_t directory;
  int64_t directory_nbytes;
  bool zip64;
  int64_t end;
};

}  // namespace

Result<TensorFrame> TensorFrame::make(DType dtype, std::span<const int64_t> sizes) {
  std::array<std::byte, kMaxTensorPickleNbytes> pickle;
  ASSIGN_OR_RETURN(const int64_t pickle_nbytes, write_tensor_pickle(dtype, sizes, pickle));
  TensorFrame frame;
  frame.dtype_ = dtype;
  frame.sizes_.assign(sizes.begin(), sizes.end());
  frame.pickle_nbytes_ = pickle_nbytes;
  frame.pickle_crc_ = crc32(0, slice(Bytes(pickle), 0, pickle_nbytes));
  // write_tensor_pickle has checked that neither product overflows.
  frame.payload_nbytes_ = *checked_numel(frame.sizes_) * itemsize(dtype);
  frame.head_nbytes_ = FrameMap(pickle_nbytes, frame.payload_nbytes_).payload;
  constexpr int64_t kMaxTailNbytes = 4096;
  const auto payload_end = checked_add(frame.head_nbytes_, frame.payload_nbytes_);
  if (!payload_end || *payload_end > INT64_MAX - kMaxTailNbytes) {
    return invalid_argument("cannot store a tensor of ", frame.payload_nbytes_, " bytes");
  }
  frame.tail_nbytes_ = TailMap(*payload_end, is_zip64(frame.payload_nbytes_)).end - *payload_end;
  return frame;
}

void TensorFrame::write_head(MutableBytes out) const {
  const FrameMap map(pickle_nbytes_, payload_nbytes_);
  const bool zip64 = is_zip64(payload_nbytes_);
  std::array<std::byte, kMaxTensorPickleNbytes> pickle;
  // `make` succeeded with the same arguments.
  (void)write_tensor_pickle(dtype_, sizes_, pickle);

  FieldWriter head(out);
  write_local(head, {kPickleName, pickle_crc_, pickle_nbytes_}, 0);
  head.text(as_text(slice(Bytes(pickle), 0, pickle_nbytes_)));
  write_local(head, {kByteOrderName, kByteOrderCrc, nbytes_of(kByteOrder)}, 0);
  head.text(kByteOrder);
  write_local(head, {kVersionName, kVersionCrc, nbytes_of(kVersionText)}, 0);
  head.text(kVersionText);

  // The head may be written before the payload is summed, so a data descriptor states the CRC.
  write_local(head,
              {kPayloadName, 0, zip64 ? payload_nbytes_ : 0, kZipUtf8Flag | kZipDescriptorFlag},
              map.padding_nbytes + (zip64 ? kZip64ExtraNbytes : 0));
  if (zip64) write_zip64_extra(head, payload_nbytes_);
  if (map.padding_nbytes > 0) {
    head.u16(kPaddingTag);
    head.u16(map.padding_nbytes - kZipExtraHeaderNbytes);
    head.fill(kPaddingByte, map.padding_nbytes - kZipExtraHeaderNbytes);
  }
}

void TensorFrame::write_tail(uint32_t crc, MutableBytes out) const {
  const FrameMap map(pickle_nbytes_, payload_nbytes_);
  const bool zip64 = is_zip64(payload_nbytes_);
  const TailMap ends(head_nbytes_ + payload_nbytes_, zip64);

  FieldWriter tail(out);
  tail.u32(kZipDescriptorSignature);
  tail.u32(crc);
  for (int i = 0; i < 2; ++i) {
    if (zip64) {
      tail.u64(payload_nbytes_);
    } else {
      tail.u32(payload_nbytes_);
    }
  }

  write_entry(tail, {kPickleName, pickle_crc_, pickle_nbytes_}, 0);
  write_entry(tail, {kByteOrderName, kByteOrderCrc, nbytes_of(kByteOrder)}, map.byte_order);
  write_entry(tail, {kVersionName, kVersionCrc, nbytes_of(kVersionText)}, map.version);
  write_entry(tail, {kPayloadName, crc, payload_nbytes_, kZipUtf8Flag | kZipDescriptorFlag},
              map.payload_header);

  if (ends.zip64) {
    tail.u32(kZip64EndSignature);
    tail.u64(kZip64EndNbytes - 12);  // Length of the record after this field.
    tail.u16(kZip64Version);         // Made by.
    tail.u16(kZip64Version);         // Version needed.
    tail.u32(0);                     // Number of this disk.
    tail.u32(0);                     // Disk of the directory.
    tail.u64(kEntryCount);           // Entries on this disk.
    tail.u64(kEntryCount);           // Entries in total.
    tail.u64(ends.directory_nbytes);
    tail.u64(ends.directory);
    tail.u32(kZip64LocatorSignature);
    tail.u32(0);
    tail.u64(ends.directory + ends.directory_nbytes);
    tail.u32(1);  // Number of disks.
  }
  tail.u32(kZipEndSignature);
  tail.u16(0);
  tail.u16(0);
  tail.u16(kEntryCount);
  tail.u16(kEntryCount);
  tail.u32(ends.directory_nbytes);
  tail.u32(std::min(ends.directory, kZip32Limit));
  tail.u16(0);  // No comment.
}

}  // namespace torch_ckpt
