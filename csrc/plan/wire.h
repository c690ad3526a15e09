#pragma once

// The least that plans need to travel between ranks: numbers and words one after another, in a
// frame with a magic, a version and a checksum.
//
//   4 bytes   magic
//   4 bytes   version, little-endian
//   ...       body
//   8 bytes   XXH3-64 of all bytes before, little-endian
//
// Every version keeps this frame, so that an older build can tell a newer plan from a damaged one.
// A *varint* is 7 bits a byte, the lowest first, the top bit set in all bytes but the last; it is
// below 2^63. A *word* is a varint, its length, and then as many bytes.

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

class WireWriter {
 public:
  void byte(uint8_t value) { bytes_.push_back(static_cast<std::byte>(value)); }

  // Requires: value >= 0.
  void varint(int64_t value) {
    auto rest = static_cast<uint64_t>(value);
    for (; rest >= 0x80; rest >>= 7) byte(static_cast<uint8_t>(rest | 0x80));
    byte(static_cast<uint8_t>(rest));
  }

  void append(Bytes bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }

  void word(std::string_view text) {
    varint(static_cast<int64_t>(text.size()));
    append(as_bytes(text));
  }

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  Bytes bytes() const { return bytes_; }

  // What was written, in its frame. `magic`: 4 characters.
  std::vector<std::byte> finish(std::string_view magic, uint32_t version) const;

 private:
  std::vector<std::byte> bytes_;
};

// Reads what WireWriter wrote, or anything else. Each function returns false where the bytes do not
// hold what it is to read; the reader is then of no more use.
class WireReader {
 public:
  explicit WireReader(Bytes bytes) : next_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  int64_t left() const { return end_ - next_; }

  bool byte(uint8_t* out) {
    if (next_ == end_) return false;
    *out = static_cast<uint8_t>(*next_++);
    return true;
  }

  bool varint(int64_t* out) {
    if (next_ != end_ && static_cast<uint8_t>(*next_) < 0x80) {
      *out = static_cast<uint8_t>(*next_++);
      return true;
    }
    return long_varint(out);
  }

  // A view into the bytes read.
  bool bytes(int64_t nbytes, Bytes* out) {
    if (nbytes < 0 || nbytes > left()) return false;
    *out = {next_, static_cast<size_t>(nbytes)};
    next_ += nbytes;
    return true;
  }

  bool word(std::string_view* out) {
    int64_t nbytes;
    Bytes text;
    if (!varint(&nbytes) || !bytes(nbytes, &text)) return false;
    *out = as_text(text);
    return true;
  }

 private:
  bool long_varint(int64_t* out) {
    uint64_t value = 0;
    for (int shift = 0; shift < 63 && next_ != end_; shift += 7) {
      const auto part = static_cast<uint64_t>(*next_++);
      value |= (part & 0x7F) << shift;
      if (part < 0x80) {
        *out = static_cast<int64_t>(value);
        return true;
      }
    }
    return false;
  }

  const std::byte* next_;
  const std::byte* end_;
};

// The body of a frame. kCorruption where magic or checksum are wrong, kUnsupported for another
// version; `what` is the subject of the message, as in "a plan".
Result<Bytes> open_wire(Bytes bytes, std::string_view magic, uint32_t version,
                        std::string_view what);

}  // namespace torch_ckpt
