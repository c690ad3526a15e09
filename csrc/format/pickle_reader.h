#pragma once

// Pickle opcodes, and PickleReader, a cursor over the bytes of a pickle.
//
// bindings/metadata_unpickler is the only stack machine that evaluates opcodes. The other users
// parse opcodes sequentially: tensor_pickle reads the pickle of one tensor, and pickle_globals
// lists the globals of a pickle.

#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/bytes.h"

namespace torch_ckpt {

// Opcodes, named as in Python's pickletools.
namespace pickle_opcodes {
enum : uint8_t {
  kMark = '(',
  kEmptyTuple = ')',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kFloat = 'F',
  kBinFloat = 'G',
  kInt = 'I',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kLong = 'L',
  kBinInt2 = 'M',
  kNone = 'N',
  kPersId = 'P',
  kBinPersId = 'Q',
  kReduce = 'R',
  kString = 'S',
  kBinString = 'T',
  kShortBinString = 'U',
  kUnicode = 'V',
  kBinUnicode = 'X',
  kEmptyList = ']',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kGet = 'g',
  kBinGet = 'h',
  kInst = 'i',
  kLongBinGet = 'j',
  kPut = 'p',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kProto = 0x80,
  kNewObj = 0x81,
  kExt1 = 0x82,
  kExt2 = 0x83,
  kExt4 = 0x84,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};
}  // namespace pickle_opcodes

inline constexpr uint8_t kNewestPickleProtocol = 5;

// Returns whether the byte is an opcode of any pickle protocol.
inline bool is_pickle_opcode(uint8_t op) {
  constexpr std::string_view kTextOpcodes = "(.012BCFGIJKLMNPQRSTUVX])abcdeghijlopqrstu}";
  return (op >= pickle_opcodes::kProto && op <= 0x98) ||
         kTextOpcodes.find(static_cast<char>(op)) != std::string_view::npos;
}

// Decodes the digits of a LONG1: up to 8 bytes, little-endian, two's complement.
inline int64_t pickled_long(std::string_view digits) {
  const bool negative = !digits.empty() && (static_cast<uint8_t>(digits.back()) & 0x80) != 0;
  int64_t number = negative ? -1 : 0;
  std::memcpy(&number, digits.data(), digits.size());
  return number;
}

// Cursor over the bytes of a pickle. If the bytes end too early, a read returns false and leaves
// the position unchanged. Returned views point into the pickle.
class PickleReader {
 public:
  explicit PickleReader(Bytes pickle) : pickle_(pickle) {}

  size_t position() const { return position_; }
  size_t nbytes() const { return pickle_.size(); }
  bool at_end() const { return position_ == pickle_.size(); }

  template <typename T>
  bool read(T* value) {
    if (pickle_.size() - position_ < sizeof(T)) return false;
    *value = load_le<T>(pickle_.data() + position_);
    position_ += sizeof(T);
    return true;
  }

  bool read_bytes(uint64_t nbytes, std::string_view* bytes) {
    if (pickle_.size() - position_ < nbytes) return false;
    *bytes = as_text(pickle_).substr(position_, static_cast<size_t>(nbytes));
    position_ += static_cast<size_t>(nbytes);
    return true;
  }

  // Reads up to a newline and skips it.
  bool read_line(std::string_view* line) {
    const size_t end = as_text(pickle_).find('\n', position_);
    if (end == std::string_view::npos) return false;
    *line = as_text(pickle_).substr(position_, end - position_);
    position_ = end + 1;
    return true;
  }

  // Skips the next opcode if it is `op`.
  bool skip(uint8_t op) {
    if (at_end() || static_cast<uint8_t>(pickle_[position_]) != op) return false;
    ++position_;
    return true;
  }

 private:
  Bytes pickle_;
  size_t position_ = 0;
};

}  // namespace torch_ckpt
