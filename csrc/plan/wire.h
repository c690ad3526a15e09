#pragma once

// The wire encoding of plans that travel between ranks. A frame surrounds a body of varints and
// words:
//
//   4 bytes   magic
//   4 bytes   version, little-endian
//   ...       body
//   8 bytes   XXH3-64 of all bytes before, little-endian
//
// The frame is the same in every version, so an older build can distinguish a newer plan from a
// damaged one. A *varint* has 7 bits per byte, lowest bits first; the top bit is set in all bytes
// but the last. Its value is below 2^63. A *word* is a varint with the length, followed by that
// many bytes.

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

  // Returns all written bytes in a frame. `magic` has 4 characters.
  std::vector<std::byte> finish(std::string_view magic, uint32_t version) const;

 private:
  std::vector<std::byte> bytes_;
};

// Decodes bytes that WireWriter wrote; accepts arbitrary bytes. Each function returns false if the
// next bytes are not a value of its type. After a failure the reader must not be used again.
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

  // Sets `out` to a view of the next `nbytes` bytes.
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
      const auto next_byte = static_cast<uint64_t>(*next_++);
      value |= (next_byte & 0x7F) << shift;
      if (next_byte < 0x80) {
        *out = static_cast<int64_t>(value);
        return true;
      }
    }
    return false;
  }

  const std::byte* next_;
  const std::byte* end_;
};

// Returns the version of a frame; 0 if the frame is cut off.
uint32_t wire_version(Bytes bytes);

// Checks a frame and returns its body. kCorruption if the magic or the checksum is wrong,
// kUnsupported for another version. `what` is the subject of the error message, e.g. "a plan".
Result<Bytes> open_wire(Bytes bytes, std::string_view magic, uint32_t version,
                        std::string_view what);

}  // namespace torch_ckpt
