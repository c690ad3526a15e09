#include "format/pickle_globals.h"

#include <cstdint>
#include <optional>

#include "format/pickle_reader.h"

namespace torch_ckpt {
namespace {

using namespace pickle_opcodes;

// The argument of an opcode. At most one field is not 0.
struct Argument {
  int nbytes = 0;         // Length of a fixed-length argument.
  int length_nbytes = 0;  // Width of the length prefix of a variable-length argument.
  int lines = 0;          // Number of text lines.
};

// Returns the argument type that Python's pickletools documents, or nullopt for an unknown opcode.
std::optional<Argument> argument_of(uint8_t op) {
  switch (op) {
    case kBinInt1:
    case kBinGet:
    case kBinPut:
    case kProto:
      return Argument{.nbytes = 1};
    case kBinInt2:
      return Argument{.nbytes = 2};
    case kBinInt:
    case kLongBinGet:
    case kLongBinPut:
      return Argument{.nbytes = 4};
    case kBinFloat:
    case kFrame:
      return Argument{.nbytes = 8};
    case kShortBinUnicode:
    case kShortBinBytes:
    case kLong1:
    case kShortBinString:
      return Argument{.length_nbytes = 1};
    case kBinUnicode:
    case kBinBytes:
    case kLong4:
    case kBinString:
      return Argument{.length_nbytes = 4};
    case kBinUnicode8:
    case kBinBytes8:
    case kByteArray8:
      return Argument{.length_nbytes = 8};
    case kInt:
    case kLong:
    case kFloat:
    case kString:
    case kUnicode:
    case kPersId:
    case kGet:
    case kPut:
      return Argument{.lines = 1};
    default:
      if (is_pickle_opcode(op)) return Argument{};
      return std::nullopt;
  }
}

bool skip_argument(const Argument& argument, PickleReader* reader) {
  std::string_view skipped;
  uint64_t length = 0;
  for (int i = 0; i < argument.length_nbytes; ++i) {
    uint8_t byte = 0;
    if (!reader->read(&byte)) return false;
    length |= static_cast<uint64_t>(byte) << (8 * i);
  }
  if (!reader->read_bytes(length, &skipped)) return false;
  if (!reader->read_bytes(static_cast<uint64_t>(argument.nbytes), &skipped)) return false;
  return argument.lines == 0 || reader->read_line(&skipped);
}

}  // namespace

Result<std::vector<GlobalName>> pickle_globals(Bytes pickle) {
  std::vector<GlobalName> globals;
  PickleReader reader(pickle);
  uint8_t op = 0;
  while (reader.read(&op)) {
    if (op == kStop) return globals;
    if (op == kGlobal || op == kInst) {
      GlobalName& global = globals.emplace_back();
      if (!reader.read_line(&global.first) || !reader.read_line(&global.second)) break;
      continue;
    }
    if (op == kStackGlobal || op == kExt1 || op == kExt2 || op == kExt4) {
      return unsupported("the pickle names a global in another way than torch.save, at byte ",
                         reader.position());
    }
    if (op == kPop || op == kPopMark) {
      return unsupported("the pickle has a tuple that contains itself, at byte ",
                         reader.position());
    }
    const std::optional<Argument> argument = argument_of(op);
    if (!argument) return corruption("not a pickle: an unknown opcode at byte ", reader.position());
    if (!skip_argument(*argument, &reader)) break;
  }
  return corruption("not a pickle: it is cut off");
}

}  // namespace torch_ckpt
