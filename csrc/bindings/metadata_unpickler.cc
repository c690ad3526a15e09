#include "bindings/metadata_unpickler.h"

#include <algorithm>
#include <bit>
#include <string>

#include "bindings/global_calls.h"
#include "bindings/value_stack.h"
#include "format/pickle_reader.h"

namespace torch_ckpt {
namespace {

using namespace pickle_opcodes;

// Limits on the nodes of the result: kMaxWeightPerByte for each byte of the pickle, and
// kMaxWeightBesides in addition. Two bytes can recall a torch.Size with 64 numbers.
constexpr uint64_t kMaxWeightPerByte = 64;
constexpr uint64_t kMaxWeightBesides = 4096;

using Kind = ValueStack::Kind;

class MetadataUnpickler {
 public:
  MetadataUnpickler(Bytes pickle, PyObject* vocabulary)
      : reader_(pickle),
        stack_(static_cast<uint32_t>(
            std::min<uint64_t>(kMaxWeightBesides + kMaxWeightPerByte * pickle.size(), UINT32_MAX))),
        globals_(vocabulary, &stack_) {}

  Status run(PyRef* result) {
    const Status status = run_to_end(result);
    if (status.ok() || status.code() == StatusCode::kInternal) return status;
    return Status(status.code(), str_cat(status.message(), ", at byte ", reader_.position()));
  }

 private:
  Status run_to_end(PyRef* result) {
    while (true) {
      uint8_t op = 0;
      RETURN_IF_ERROR(read(&op));
      if (op == kStop) break;
      RETURN_IF_ERROR(step(op));
    }
    return stack_.finish(result);
  }

  template <typename T>
  Status read(T* value) {
    return reader_.read(value) ? ok_status() : broken("it is cut off");
  }
  Status read_bytes(uint64_t nbytes, std::string_view* bytes) {
    return reader_.read_bytes(nbytes, bytes) ? ok_status() : broken("it is cut off");
  }
  Status read_line(std::string_view* line) {
    return reader_.read_line(line) ? ok_status() : broken("it is cut off");
  }

  // Each push function reads the argument of its opcode: a number, or a length and its bytes.

  template <typename Number>
  Status push_int() {
    Number number = 0;
    RETURN_IF_ERROR(read(&number));
    return stack_.push(Kind::kInt, PyLong_FromLongLong(number));
  }

  Status push_long() {
    uint8_t nbytes = 0;
    std::string_view digits;
    RETURN_IF_ERROR(read(&nbytes));
    RETURN_IF_ERROR(read_bytes(nbytes, &digits));
    if (nbytes > sizeof(int64_t)) return refused("a number beyond 64 bits");
    return stack_.push(Kind::kInt, PyLong_FromLongLong(pickled_long(digits)));
  }

  Status push_float() {
    uint64_t bits = 0;
    RETURN_IF_ERROR(read(&bits));
    return stack_.push(Kind::kPlain,
                       PyFloat_FromDouble(std::bit_cast<double>(__builtin_bswap64(bits))));
  }

  template <typename Length>
  Status push_text() {
    Length nbytes = 0;
    std::string_view text;
    RETURN_IF_ERROR(read(&nbytes));
    RETURN_IF_ERROR(read_bytes(nbytes, &text));
    return push_text(text);
  }

  template <typename Length>
  Status push_bytes() {
    Length nbytes = 0;
    std::string_view bytes;
    RETURN_IF_ERROR(read(&nbytes));
    RETURN_IF_ERROR(read_bytes(nbytes, &bytes));
    return stack_.push(Kind::kPlain, PyBytes_FromStringAndSize(
                                         bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
  }

  Status push_text(std::string_view utf8) {
    PyObject* text =
        PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass");
    if (text == nullptr && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
      PyErr_Clear();
      return broken("a text is not UTF-8");
    }
    return stack_.push(Kind::kText, text);
  }

  Status push_constant(PyObject* object) {
    return stack_.push(Kind::kPlain, PyRef::share(object).release());
  }

  Status push_line_global() {
    std::string_view module;
    std::string_view name;
    RETURN_IF_ERROR(read_line(&module));
    RETURN_IF_ERROR(read_line(&name));
    RETURN_IF_ERROR(push_text(module));
    RETURN_IF_ERROR(push_text(name));
    return globals_.push();
  }

  template <typename Number>
  Status remember() {
    Number key = 0;
    RETURN_IF_ERROR(read(&key));
    return stack_.remember(key);
  }

  template <typename Number>
  Status recall() {
    Number key = 0;
    RETURN_IF_ERROR(read(&key));
    return stack_.recall(key);
  }

  Status step(uint8_t op);
  Status step_in_tree(uint8_t op);
  Status set_items(size_t begin);

  PickleReader reader_;
  bool has_protocol_ = false;
  ValueStack stack_;
  GlobalCalls globals_;
};

// Does not create a dict that is only the state of a record.
Status MetadataUnpickler::set_items(size_t begin) {
  RETURN_IF_ERROR(stack_.need_below(begin, 1));
  const ValueStack::Value& dict = stack_.at(begin - 1);
  if (dict.kind == Kind::kDict && dict.is_open && !dict.object && reader_.skip(kBuild)) {
    return globals_.build_from_items(begin);
  }
  return stack_.set_items(begin);
}

Status MetadataUnpickler::step(uint8_t op) {
  switch (op) {
    case kProto: {
      uint8_t version = 0;
      RETURN_IF_ERROR(read(&version));
      has_protocol_ = true;
      return version <= kNewestPickleProtocol ? ok_status() : refused("a protocol that is too new");
    }
    case kFrame: {
      uint64_t nbytes = 0;
      return read(&nbytes);
    }
    case kNone:
      return push_constant(Py_None);
    case kNewTrue:
      return push_constant(Py_True);
    case kNewFalse:
      return push_constant(Py_False);
    case kBinInt:
      return push_int<int32_t>();
    case kBinInt1:
      return push_int<uint8_t>();
    case kBinInt2:
      return push_int<uint16_t>();
    case kLong1:
      return push_long();
    case kBinFloat:
      return push_float();
    case kShortBinUnicode:
      return push_text<uint8_t>();
    case kBinUnicode:
      return push_text<uint32_t>();
    case kBinUnicode8:
      return push_text<uint64_t>();
    case kShortBinBytes:
      return push_bytes<uint8_t>();
    case kBinBytes:
      return push_bytes<uint32_t>();
    case kBinBytes8:
      return push_bytes<uint64_t>();
    case kBinPut:
      return remember<uint8_t>();
    case kLongBinPut:
      return remember<uint32_t>();
    case kMemoize:
      return stack_.remember();
    case kBinGet:
      return recall<uint8_t>();
    case kLongBinGet:
      return recall<uint32_t>();
    default:
      return step_in_tree(op);
  }
}

Status MetadataUnpickler::step_in_tree(uint8_t op) {
  size_t begin = 0;
  switch (op) {
    case kMark:
      stack_.push_mark();
      return ok_status();
    case kEmptyTuple:
      return stack_.make_tuple(stack_.size());
    case kTuple2:
      if (globals_.is_member_next()) return globals_.choose_member();
      [[fallthrough]];
    case kTuple1:
    case kTuple3: {
      const size_t count = static_cast<size_t>(op - kTuple1) + 1;
      RETURN_IF_ERROR(stack_.need(count));
      return stack_.make_tuple(stack_.size() - count);
    }
    case kTuple:
      RETURN_IF_ERROR(stack_.pop_mark(&begin));
      return stack_.make_tuple(begin);
    case kEmptyList:
      return stack_.push(Kind::kList, PyList_New(0));
    case kAppend:
      RETURN_IF_ERROR(stack_.need(2));
      return stack_.append(stack_.size() - 1);
    case kAppends:
      RETURN_IF_ERROR(stack_.pop_mark(&begin));
      return stack_.append(begin);
    case kEmptyDict:
      stack_.push_empty_dict();
      return ok_status();
    case kSetItem:
      RETURN_IF_ERROR(stack_.need(3));
      return set_items(stack_.size() - 2);
    case kSetItems:
      RETURN_IF_ERROR(stack_.pop_mark(&begin));
      return set_items(begin);
    case kGlobal:
      return push_line_global();
    case kStackGlobal:
      return globals_.push();
    case kReduce:
      return globals_.call();
    case kNewObj:
      return globals_.make_record();
    case kBuild:
      return globals_.build_from_tuple();
    default: {
      constexpr std::string_view kDigits = "0123456789abcdef";
      const std::string code = {'0', 'x', kDigits[op >> 4], kDigits[op & 15]};
      // Without a PROTO opcode, the bytes may be no pickle at all.
      if (is_pickle_opcode(op) && has_protocol_) {
        return refused("the opcode " + code + ", which plain data does not need");
      }
      return broken("it has the opcode " + code);
    }
  }
}

}  // namespace

PyObject* unpickle_metadata(Bytes pickle, PyObject* vocabulary, Status* status) {
  PyRef result;
  *status = MetadataUnpickler(pickle, vocabulary).run(&result);
  if (!status->ok() || PyErr_Occurred() != nullptr) return nullptr;
  return result.release();
}

}  // namespace torch_ckpt
