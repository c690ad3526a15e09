#include "bindings/metadata_unpickler.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "bindings/value_stack.h"

namespace torch_ckpt {
namespace {

// Opcodes, by the names in Python's pickletools.
enum : uint8_t {
  kMark = '(',
  kEmptyTuple = ')',
  kStop = '.',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kReduce = 'R',
  kBinUnicode = 'X',
  kEmptyList = ']',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
};

constexpr uint8_t kNewestProtocol = 5;

// How many values a walk of the result may meet for each byte of the pickle, and besides. The
// longest sizes that torch has, 64 of them, are recalled by two bytes.
constexpr uint64_t kMaxWeightPerByte = 64;
constexpr uint64_t kMaxWeightBesides = 4096;

// Whether Python's pickle knows the opcode.
bool is_opcode(uint8_t op) {
  constexpr std::string_view kTextOpcodes = "(.012BCFGIJKLMNPQRSTUVX])abcdeghijlopqrstu}";
  return (op >= kProto && op <= 0x98) ||
         kTextOpcodes.find(static_cast<char>(op)) != std::string_view::npos;
}

using Kind = ValueStack::Kind;
using Value = ValueStack::Value;

// An entry of the vocabulary. Borrows from it.
struct Global {
  enum class How : uint8_t { kSizes, kChoice, kText, kRecord };

  How how = How::kText;
  PyObject* target = nullptr;
  PyObject* fields = nullptr;
  uint64_t required = 0;  // A bit for each field that must be there.
  bool is_hashable = false;
  std::string name;
};

std::string quoted(PyObject* text) {
  Py_ssize_t nbytes = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text, &nbytes);
  if (utf8 == nullptr) {  // A lone surrogate.
    PyErr_Clear();
    return "?";
  }
  constexpr Py_ssize_t kLongest = 200;
  return std::string(utf8, static_cast<size_t>(std::min(nbytes, kLongest)));
}

bool is_size(PyObject* number) {
  if (!PyLong_CheckExact(number)) return false;
  int overflow = 0;
  return PyLong_AsLongLongAndOverflow(number, &overflow) >= 0 && overflow == 0;
}

class MetadataUnpickler {
 public:
  MetadataUnpickler(Bytes pickle, PyObject* vocabulary)
      : pickle_(pickle),
        vocabulary_(vocabulary),
        stack_(static_cast<uint32_t>(std::min<uint64_t>(
            kMaxWeightBesides + kMaxWeightPerByte * pickle.size(), UINT32_MAX))) {}

  Status run(PyRef* result) {
    const Status status = run_to_end(result);
    if (status.ok() || status.code() == StatusCode::kInternal) return status;
    return Status(status.code(), str_cat(status.message(), ", at byte ", position_));
  }

 private:
  Status run_to_end(PyRef* result) {
    while (true) {
      uint8_t op = 0;
      RETURN_IF_ERROR(read(&op));
      if (op == kStop) break;
      RETURN_IF_ERROR(step(op));
    }
    if (position_ != pickle_.size()) return broken("bytes follow its end");
    return stack_.finish(result);
  }

  static Status broken(const std::string& why) { return corruption(why); }
  static Status refused(const std::string& what) { return unsupported("the pickle holds ", what); }

  template <typename T>
  Status read(T* value) {
    if (pickle_.size() - position_ < sizeof(T)) return broken("it is cut off");
    *value = load_le<T>(pickle_.data() + position_);
    position_ += sizeof(T);
    return ok_status();
  }

  Status read_bytes(uint64_t nbytes, std::string_view* bytes) {
    if (pickle_.size() - position_ < nbytes) return broken("it is cut off");
    *bytes = as_text(pickle_).substr(position_, static_cast<size_t>(nbytes));
    position_ += static_cast<size_t>(nbytes);
    return ok_status();
  }

  Status read_line(std::string_view* line) {
    const size_t end = as_text(pickle_).find('\n', position_);
    if (end == std::string_view::npos) return broken("it is cut off");
    *line = as_text(pickle_).substr(position_, end - position_);
    position_ = end + 1;
    return ok_status();
  }

  // Each of the following reads its argument: a number, or a length and so many bytes.

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
    const bool negative = nbytes > 0 && (static_cast<uint8_t>(digits.back()) & 0x80) != 0;
    int64_t number = negative ? -1 : 0;
    if (nbytes > 0) std::memcpy(&number, digits.data(), nbytes);
    return stack_.push(Kind::kInt, PyLong_FromLongLong(number));
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
    return push_global();
  }

  // The global whose module and name are on the stack.
  Status push_global();
  Status learn(PyObject* entry, std::string name);

  // Calls what is below the top with the arguments at the top.
  Status reduce();
  Status new_object();

  // A record's fields from the keys and values from `begin`, between which and the record is an
  // empty dict; or from the tuple at the top.
  Status build_from_items(size_t begin);
  Status build_from_tuple();
  Status open_record(size_t at, const Global** global);
  // Sets a bit of `*found` for the field.
  Status set_field(const Global& global, PyObject* record, PyObject* name, PyObject* value,
                   uint64_t* found);

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

  bool next_is(uint8_t op) const {
    return position_ < pickle_.size() && static_cast<uint8_t>(pickle_[position_]) == op;
  }

  Status step(uint8_t op);
  Status step_in_tree(uint8_t op);
  Status set_items(size_t begin);

  Bytes pickle_;
  PyObject* vocabulary_;
  size_t position_ = 0;
  ValueStack stack_;
  std::vector<Global> globals_;  // Those seen; values name them by number.
};

Status MetadataUnpickler::push_global() {
  RETURN_IF_ERROR(stack_.need(2));
  const Value name = stack_.pop();
  const Value module = stack_.pop();
  if (name.kind != Kind::kText || module.kind != Kind::kText) {
    return broken("a global is not named by text");
  }
  const std::string full_name = quoted(module.object.get()) + "." + quoted(name.object.get());
  const PyRef key = PyRef::steal(PyTuple_Pack(2, module.object.get(), name.object.get()));
  if (!key) return python_error();
  PyObject* entry = PyDict_GetItemWithError(vocabulary_, key.get());
  if (entry == nullptr) {
    if (PyErr_Occurred() != nullptr) return python_error();
    return refused("the global " + full_name);
  }
  PyObject* target = PyTuple_GET_ITEM(entry, 1);
  if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(entry, 0), "value") == 0) {
    return push_constant(target);
  }
  const auto is_same = [target](const Global& global) { return global.target == target; };
  auto global = std::find_if(globals_.begin(), globals_.end(), is_same);
  if (global == globals_.end()) {
    RETURN_IF_ERROR(learn(entry, full_name));
    global = globals_.end() - 1;
  }
  RETURN_IF_ERROR(stack_.push(Kind::kGlobal, PyRef::share(target).release()));
  stack_.top().global = static_cast<uint8_t>(global - globals_.begin());
  return ok_status();
}

Status MetadataUnpickler::learn(PyObject* entry, std::string name) {
  if (globals_.size() > UINT8_MAX) return internal_error("the vocabulary is too large");
  Global global{.target = PyTuple_GET_ITEM(entry, 1), .name = std::move(name)};
  const std::string how = quoted(PyTuple_GET_ITEM(entry, 0));
  if (how == "sizes") global.how = Global::How::kSizes;
  if (how == "choice") global.how = Global::How::kChoice;
  if (how == "record") {
    global.how = Global::How::kRecord;
    global.fields = PyTuple_GET_ITEM(entry, 2);
    global.required = (uint64_t{1} << PyLong_AsLong(PyTuple_GET_ITEM(entry, 3))) - 1;
    global.is_hashable = PyTuple_GET_ITEM(entry, 4) == Py_True;
  }
  globals_.push_back(std::move(global));
  return ok_status();
}

Status MetadataUnpickler::reduce() {
  RETURN_IF_ERROR(stack_.need(2));
  const Value args = stack_.pop();
  const Value called = stack_.pop();
  if (args.kind != Kind::kTuple) return broken("the arguments of a call are no tuple");
  if (called.kind != Kind::kGlobal || globals_[called.global].how == Global::How::kRecord) {
    return refused("a call of something that is no function");
  }
  const Global& global = globals_[called.global];
  const Py_ssize_t count = PyTuple_GET_SIZE(args.object.get());
  PyObject* const* items = reinterpret_cast<PyTupleObject*>(args.object.get())->ob_item;
  const bool all_texts = std::all_of(
      items, items + count, [](PyObject* item) { return PyUnicode_CheckExact(item) != 0; });
  const Status bad_call = broken(global.name + " has arguments that it cannot have");
  if (global.how == Global::How::kText) {
    if (!all_texts) return bad_call;
    return stack_.push(Kind::kPlain, PyObject_CallObject(global.target, args.object.get()));
  }
  if (count != 1) return bad_call;
  if (global.how == Global::How::kChoice) {
    if (!all_texts && !PyLong_CheckExact(items[0])) return bad_call;
    PyObject* chosen = PyDict_GetItemWithError(global.target, items[0]);
    if (chosen != nullptr) return push_constant(chosen);
    return PyErr_Occurred() != nullptr ? python_error() : bad_call;
  }
  if (!PyTuple_CheckExact(items[0])) return bad_call;
  PyObject* const* sizes = reinterpret_cast<PyTupleObject*>(items[0])->ob_item;
  if (!std::all_of(sizes, sizes + PyTuple_GET_SIZE(items[0]), is_size)) return bad_call;
  RETURN_IF_ERROR(stack_.push(Kind::kPlain, PyObject_CallOneArg(global.target, items[0])));
  stack_.top().weight = args.weight;
  return ok_status();
}

Status MetadataUnpickler::new_object() {
  RETURN_IF_ERROR(stack_.need(2));
  const Value args = stack_.pop();
  const Value made = stack_.pop();
  if (made.kind != Kind::kGlobal || globals_[made.global].how != Global::How::kRecord) {
    return refused("an instance of something that is no record");
  }
  if (args.kind != Kind::kTuple || PyTuple_GET_SIZE(args.object.get()) != 0) {
    return broken("a new " + globals_[made.global].name + " has arguments");
  }
  // What object.__new__ does; the class has no say in it.
  auto* type = reinterpret_cast<PyTypeObject*>(made.object.get());
  RETURN_IF_ERROR(
      stack_.push(Kind::kRecord, PyBaseObject_Type.tp_new(type, args.object.get(), nullptr)));
  stack_.top().global = made.global;
  stack_.top().is_complete = globals_[made.global].required == 0;
  return ok_status();
}

Status MetadataUnpickler::open_record(size_t at, const Global** global) {
  const Value& record = stack_.at(at);
  if (record.kind != Kind::kRecord || !record.is_open) {
    return refused("a state for something other than a new record");
  }
  *global = &globals_[record.global];
  return ok_status();
}

Status MetadataUnpickler::build_from_items(size_t begin) {
  RETURN_IF_ERROR(stack_.need_below(begin, 2));
  if ((stack_.size() - begin) % 2 != 0) return broken("a key has no value");
  const Global* global = nullptr;
  RETURN_IF_ERROR(open_record(begin - 2, &global));
  Value& record = stack_.at(begin - 2);
  uint64_t found = 0;
  for (size_t i = begin; i < stack_.size(); i += 2) {
    Value& name = stack_.at(i);
    Value& value = stack_.at(i + 1);
    if (name.kind != Kind::kText) return broken("the name of a field is no text");
    RETURN_IF_ERROR(stack_.close(value, &record));
    RETURN_IF_ERROR(
        set_field(*global, record.object.get(), name.object.get(), value.object.get(), &found));
  }
  if ((~found & global->required) != 0) return broken("a " + global->name + " lacks a field");
  record.is_complete = true;
  record.is_hashable = global->is_hashable;
  stack_.cut(begin - 1);
  return ok_status();
}

Status MetadataUnpickler::build_from_tuple() {
  RETURN_IF_ERROR(stack_.need(2));
  const Global* global = nullptr;
  RETURN_IF_ERROR(open_record(stack_.size() - 2, &global));
  Value state = stack_.pop();
  Value& record = stack_.top();
  if (state.kind != Kind::kTuple ||
      PyTuple_GET_SIZE(state.object.get()) != PyDict_GET_SIZE(global->fields)) {
    return broken("the state of a " + global->name + " is not its fields");
  }
  RETURN_IF_ERROR(stack_.close(state, &record));
  uint64_t found = 0;
  Py_ssize_t position = 0;
  PyObject* name;
  PyObject* types;
  for (Py_ssize_t i = 0; PyDict_Next(global->fields, &position, &name, &types) != 0; ++i) {
    PyObject* value = PyTuple_GET_ITEM(state.object.get(), i);
    RETURN_IF_ERROR(set_field(*global, record.object.get(), name, value, &found));
  }
  record.is_complete = true;
  record.is_hashable = global->is_hashable;
  return ok_status();
}

Status MetadataUnpickler::set_field(const Global& global, PyObject* record, PyObject* name,
                                    PyObject* value, uint64_t* found) {
  Py_ssize_t position = 0;
  PyObject* known;
  PyObject* types;
  for (int i = 0; PyDict_Next(global.fields, &position, &known, &types) != 0; ++i) {
    if (known != name && PyUnicode_Compare(known, name) != 0) continue;
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
    PyObject* const* first = reinterpret_cast<PyTupleObject*>(types)->ob_item;
    PyObject* const* last = first + PyTuple_GET_SIZE(types);
    if (first != last && std::find(first, last, type) == last) {
      return broken("the field " + quoted(known) + " of a " + global.name + " is a " +
                    Py_TYPE(value)->tp_name);
    }
    *found |= uint64_t{1} << i;
    // Past a frozen class's own __setattr__.
    return PyObject_GenericSetAttr(record, known, value) == 0 ? ok_status() : python_error();
  }
  return refused("the field " + quoted(name) + " of a " + global.name +
                 ", which has no such field");
}

// A dict that is nothing but the state of a record is never made.
Status MetadataUnpickler::set_items(size_t begin) {
  RETURN_IF_ERROR(stack_.need_below(begin, 1));
  const Value& dict = stack_.at(begin - 1);
  if (dict.kind == Kind::kDict && dict.is_open && !dict.object && next_is(kBuild)) {
    ++position_;
    return build_from_items(begin);
  }
  return stack_.set_items(begin);
}

Status MetadataUnpickler::step(uint8_t op) {
  switch (op) {
    case kProto: {
      uint8_t version = 0;
      RETURN_IF_ERROR(read(&version));
      return version <= kNewestProtocol ? ok_status() : refused("a protocol that is too new");
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
    case kTuple1:
    case kTuple2:
    case kTuple3: {
      const size_t count = static_cast<size_t>(op - kTuple1) + 1;
      RETURN_IF_ERROR(stack_.need(count));
      return stack_.make_tuple(stack_.size() - count);
    }
    case kTuple:
      RETURN_IF_ERROR(stack_.take_mark(&begin));
      return stack_.make_tuple(begin);
    case kEmptyList:
      return stack_.push(Kind::kList, PyList_New(0));
    case kAppend:
      RETURN_IF_ERROR(stack_.need(2));
      return stack_.append(stack_.size() - 1);
    case kAppends:
      RETURN_IF_ERROR(stack_.take_mark(&begin));
      return stack_.append(begin);
    case kEmptyDict:
      stack_.push_empty_dict();
      return ok_status();
    case kSetItem:
      RETURN_IF_ERROR(stack_.need(3));
      return set_items(stack_.size() - 2);
    case kSetItems:
      RETURN_IF_ERROR(stack_.take_mark(&begin));
      return set_items(begin);
    case kGlobal:
      return push_line_global();
    case kStackGlobal:
      return push_global();
    case kReduce:
      return reduce();
    case kNewObj:
      return new_object();
    case kBuild:
      return build_from_tuple();
    default: {
      constexpr std::string_view kDigits = "0123456789abcdef";
      const std::string code = {'0', 'x', kDigits[op >> 4], kDigits[op & 15]};
      if (is_opcode(op)) return refused("the opcode " + code + ", which plain data does not need");
      return broken("it has an opcode that does not exist");
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
