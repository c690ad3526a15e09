#include "format/tensor_pickle.h"

#include <algorithm>
#include <array>
#include <optional>

#include "format/pickle_reader.h"

namespace torch_ckpt {
namespace {

using namespace pickle_opcodes;

// Appends pickle opcodes to a buffer. Requires: `out` has space for all of them.
class TensorWriter {
 public:
  explicit TensorWriter(MutableBytes out) : out_(out) {}

  int64_t nbytes() const { return nbytes_; }

  void raw(std::string_view text) {
    std::memcpy(out_.data() + nbytes_, text.data(), text.size());
    nbytes_ += static_cast<int64_t>(text.size());
  }

  void number(int64_t value) {
    if (value <= UINT8_MAX) {
      opcode<uint8_t>('K', value);
    } else if (value <= UINT16_MAX) {
      opcode<uint16_t>('M', value);
    } else if (value <= INT32_MAX) {
      opcode<int32_t>('J', value);
    } else {
      raw("\x8a\x08");
      append<int64_t>(value);
    }
  }

  void tuple(std::span<const int64_t> values) {
    constexpr std::array<std::string_view, 4> kShortTuples = {")", "\x85", "\x86", "\x87"};
    const bool is_short = values.size() < kShortTuples.size();
    if (!is_short) raw("(");
    for (const int64_t value : values) number(value);
    raw(is_short ? kShortTuples[values.size()] : "t");
  }

 private:
  template <typename T>
  void append(T value) {
    store_le<T>(out_.data() + nbytes_, value);
    nbytes_ += static_cast<int64_t>(sizeof(T));
  }

  template <typename T>
  void opcode(char op, int64_t argument) {
    append(op);
    append(static_cast<T>(argument));
  }

  MutableBytes out_;
  int64_t nbytes_ = 0;
};

// Computes the strides of a contiguous tensor as torch does: a size of 0 counts as 1. Returns the
// product of these sizes, or nullopt if a size is negative or the product overflows.
std::optional<int64_t> fill_strides(std::span<const int64_t> sizes, std::span<int64_t> strides) {
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] < 0) return std::nullopt;
    strides[d] = stride;
    const auto next = checked_mul(stride, std::max<int64_t>(sizes[d], 1));
    if (!next) return std::nullopt;
    stride = *next;
  }
  return stride;
}

Status not_plain(std::string_view what) {
  return unsupported("not a plain strided tensor (", what, "): torch must read it");
}

// The import name of a Python object.
struct Global {
  std::string_view module;
  std::string_view name;

  bool is(std::string_view in_module, std::string_view with_name) const {
    return module == in_module && name == with_name;
  }
};

// Parses the opcodes of a plain tensor in the order in which every pickler writes them. The parser
// has no stack and calls no function. A pickle in any other order is kUnsupported.
class TensorReader {
 public:
  explicit TensorReader(Bytes pickle) : reader_(pickle) {}

  Result<PickledTensor> read();

 private:
  Status broken(std::string_view why) const {
    return corruption("not a pickle: ", why, ", at byte ", reader_.position());
  }
  Status unexpected(uint8_t op, std::string_view what) const {
    return is_pickle_opcode(op) ? not_plain(what) : broken("it has an opcode that does not exist");
  }

  template <typename T>
  Status number(T* value) {
    return reader_.read(value) ? ok_status() : broken("it is cut off");
  }
  template <typename T>
  Status number_as(int64_t* value) {
    T found = 0;
    RETURN_IF_ERROR(number(&found));
    *value = static_cast<int64_t>(found);
    return ok_status();
  }

  // Reads the next opcode. Skips opcodes that only frame the pickle or fill its memo.
  Status next(uint8_t* op);
  // `what` describes the mismatch if the next opcode is not `wanted`.
  Status expect(uint8_t wanted, std::string_view what);

  // Each of the following functions parses one value.
  Status integer(int64_t* value);
  Status integer(uint8_t op, std::string_view what, int64_t* value);
  Status text(std::string_view* value);
  Status text(uint8_t op, std::string_view what, std::string_view* value);
  Status global(Global* value);
  Status dims(Dims* value);
  Status flag();
  Status hooks();
  Status storage(Global* type, int64_t* numel, std::string_view* key);

  PickleReader reader_;
};

Status TensorReader::next(uint8_t* op) {
  int64_t ignored = 0;
  while (true) {
    RETURN_IF_ERROR(number(op));
    switch (*op) {
      case kProto:
        RETURN_IF_ERROR(number_as<uint8_t>(&ignored));
        if (ignored > kNewestPickleProtocol) return broken("its protocol does not exist");
        break;
      case kFrame:
        RETURN_IF_ERROR(number_as<uint64_t>(&ignored));
        break;
      case kBinPut:
        RETURN_IF_ERROR(number_as<uint8_t>(&ignored));
        break;
      case kLongBinPut:
        RETURN_IF_ERROR(number_as<uint32_t>(&ignored));
        break;
      case kMemoize:
        break;
      default:
        return ok_status();
    }
  }
}

Status TensorReader::expect(uint8_t wanted, std::string_view what) {
  uint8_t op = 0;
  RETURN_IF_ERROR(next(&op));
  return op == wanted ? ok_status() : unexpected(op, what);
}

Status TensorReader::integer(int64_t* value) {
  uint8_t op = 0;
  RETURN_IF_ERROR(next(&op));
  return integer(op, "an argument is not a number", value);
}

Status TensorReader::integer(uint8_t op, std::string_view what, int64_t* value) {
  switch (op) {
    case kBinInt:
      return number_as<int32_t>(value);
    case kBinInt1:
      return number_as<uint8_t>(value);
    case kBinInt2:
      return number_as<uint16_t>(value);
    case kLong1: {
      uint8_t nbytes = 0;
      std::string_view digits;
      RETURN_IF_ERROR(number(&nbytes));
      if (!reader_.read_bytes(nbytes, &digits)) return broken("it is cut off");
      if (nbytes > sizeof(int64_t)) return not_plain("a number beyond 64 bits");
      *value = pickled_long(digits);
      return ok_status();
    }
    default:
      return unexpected(op, what);
  }
}

Status TensorReader::text(std::string_view* value) {
  uint8_t op = 0;
  RETURN_IF_ERROR(next(&op));
  return text(op, "its storage is of an unknown form", value);
}

Status TensorReader::text(uint8_t op, std::string_view what, std::string_view* value) {
  int64_t nbytes = 0;
  switch (op) {
    case kShortBinUnicode:
      RETURN_IF_ERROR(number_as<uint8_t>(&nbytes));
      break;
    case kBinUnicode:
      RETURN_IF_ERROR(number_as<uint32_t>(&nbytes));
      break;
    default:
      return unexpected(op, what);
  }
  return reader_.read_bytes(static_cast<uint64_t>(nbytes), value) ? ok_status()
                                                                  : broken("it is cut off");
}

Status TensorReader::global(Global* value) {
  constexpr std::string_view kWhat = "it names no global";
  uint8_t op = 0;
  RETURN_IF_ERROR(next(&op));
  if (op == kGlobal) {
    return reader_.read_line(&value->module) && reader_.read_line(&value->name)
               ? ok_status()
               : broken("it is cut off");
  }
  RETURN_IF_ERROR(text(op, kWhat, &value->module));
  RETURN_IF_ERROR(next(&op));
  RETURN_IF_ERROR(text(op, kWhat, &value->name));
  return expect(kStackGlobal, kWhat);
}

// Parses a tuple of sizes or strides. Tuples of up to three numbers may have no MARK.
Status TensorReader::dims(Dims* value) {
  constexpr std::string_view kWhat = "sizes or strides are no tuple of numbers";
  uint8_t op = 0;
  RETURN_IF_ERROR(next(&op));
  const bool has_mark = op == kMark;
  if (has_mark) RETURN_IF_ERROR(next(&op));
  while (op != kTuple && op != kEmptyTuple && !(op >= kTuple1 && op <= kTuple3)) {
    if (value->size() == kMaxDims) return not_plain("it has too many dimensions");
    int64_t& dim = value->emplace_back();
    RETURN_IF_ERROR(integer(op, kWhat, &dim));
    if (dim < 0) return corruption("a tensor has the size or stride ", dim);
    RETURN_IF_ERROR(next(&op));
  }
  const size_t count = op == kEmptyTuple ? 0 : static_cast<size_t>(op - kTuple1) + 1;
  const bool is_whole = has_mark ? op == kTuple : op != kTuple && value->size() == count;
  return is_whole ? ok_status() : not_plain(kWhat);
}

Status TensorReader::flag() {
  uint8_t op = 0;
  RETURN_IF_ERROR(next(&op));
  return op == kNewTrue || op == kNewFalse ? ok_status() : unexpected(op, "it has no flag");
}

// Parses the value that torch saves for "no backward hooks".
Status TensorReader::hooks() {
  constexpr std::string_view kWhat = "it carries hooks";
  const PickleReader before = reader_;
  uint8_t op = 0;
  RETURN_IF_ERROR(next(&op));
  if (op == kNone || op == kEmptyDict) return ok_status();
  reader_ = before;
  Global type;
  RETURN_IF_ERROR(global(&type));
  if (!type.is("collections", "OrderedDict")) return not_plain(kWhat);
  RETURN_IF_ERROR(expect(kEmptyTuple, kWhat));
  return expect(kReduce, kWhat);
}

// Parses a persistent id: ("storage", class, key, location, numel).
Status TensorReader::storage(Global* type, int64_t* numel, std::string_view* key) {
  constexpr std::string_view kWhat = "its storage is not a record";
  std::string_view tag, location;
  RETURN_IF_ERROR(expect(kMark, kWhat));
  RETURN_IF_ERROR(text(&tag));
  if (tag != "storage") return not_plain(kWhat);
  RETURN_IF_ERROR(global(type));
  RETURN_IF_ERROR(text(key));
  RETURN_IF_ERROR(text(&location));
  RETURN_IF_ERROR(integer(numel));
  if (*numel < 0) return corruption("a storage has ", *numel, " elements");
  RETURN_IF_ERROR(expect(kTuple, "its storage is a view"));
  return expect(kBinPersId, kWhat);
}

// Returns the dtype of a storage. An untyped storage has the dtype `element`. If `element` is null,
// the class of the storage determines the dtype.
Result<DType> dtype_of(const Global& storage, const Global* element) {
  std::optional<DType> dtype;
  if (element == nullptr) {
    if (storage.module == "torch") dtype = dtype_from_storage(storage.name);
  } else if (storage.is("torch.storage", "UntypedStorage") && element->module == "torch") {
    dtype = dtype_from_name(element->name);
  }
  if (!dtype) return not_plain(element == nullptr ? storage.name : element->name);
  return *dtype;
}

Result<PickledTensor> TensorReader::read() {
  PickledTensor tensor;
  Global function, type, element;
  int64_t numel = 0;
  uint8_t op = 0;
  RETURN_IF_ERROR(global(&function));
  const bool typed = function.is("torch._utils", "_rebuild_tensor_v2");
  if (!typed && !function.is("torch._utils", "_rebuild_tensor_v3")) {
    return not_plain(function.name);
  }
  // (storage, storage_offset, sizes, strides, requires_grad, hooks[, dtype][, metadata])
  RETURN_IF_ERROR(expect(kMark, "its arguments are of an unknown form"));
  RETURN_IF_ERROR(storage(&type, &numel, &tensor.storage_key));
  RETURN_IF_ERROR(integer(&tensor.storage_offset));
  if (tensor.storage_offset < 0) {
    return corruption("a tensor has the storage offset ", tensor.storage_offset);
  }
  RETURN_IF_ERROR(dims(&tensor.sizes));
  RETURN_IF_ERROR(dims(&tensor.strides));
  RETURN_IF_ERROR(flag());
  RETURN_IF_ERROR(hooks());
  if (!typed) RETURN_IF_ERROR(global(&element));
  RETURN_IF_ERROR(next(&op));
  if (op == kNone) RETURN_IF_ERROR(next(&op));
  if (op != kTuple) return unexpected(op, "it carries metadata");
  RETURN_IF_ERROR(expect(kReduce, "it is not rebuilt by a call"));
  RETURN_IF_ERROR(expect(kStop, "it is more than one tensor"));
  if (!reader_.at_end()) return broken("bytes follow its end");

  ASSIGN_OR_RETURN(tensor.dtype, dtype_of(type, typed ? nullptr : &element));
  const auto nbytes = checked_mul(numel, typed ? itemsize(tensor.dtype) : 1);
  if (!nbytes) return corruption("a storage has ", numel, " elements");
  tensor.storage_nbytes = *nbytes;
  if (tensor.sizes.size() != tensor.strides.size()) {
    return corruption("a tensor has ", tensor.sizes.size(), " sizes but ", tensor.strides.size(),
                      " strides");
  }
  const auto elements = checked_numel(tensor.sizes);
  if (!elements || !checked_mul(*elements, itemsize(tensor.dtype))) {
    return corruption("a tensor has too large sizes: ", to_string(tensor.sizes));
  }
  return tensor;
}

}  // namespace

Result<int64_t> write_tensor_pickle(DType dtype, std::span<const int64_t> sizes, MutableBytes out) {
  if (sizes.size() > kMaxDims) {
    return invalid_argument("cannot store a tensor of ", sizes.size(), " dimensions");
  }
  std::array<int64_t, kMaxDims> strides_memory;
  const auto strides = std::span(strides_memory).first(sizes.size());
  const DTypeInfo& info = dtype_info(dtype);
  const auto extent = fill_strides(sizes, strides);
  if (!extent || !checked_mul(*extent, info.itemsize)) {
    return invalid_argument("cannot store a ", info.name, " tensor of sizes ",
                            to_string(Dims(sizes.begin(), sizes.end())));
  }
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  const int64_t numel = empty ? 0 : *extent;
  const bool typed = !info.storage.empty();

  TensorWriter pickle(out);
  pickle.raw(
      "\x80\x02"
      "ctorch._utils\n");
  pickle.raw(typed ? "_rebuild_tensor_v2\n((" : "_rebuild_tensor_v3\n((");
  pickle.raw(std::string_view("X\x07\0\0\0storage", 12));
  pickle.raw(typed ? "ctorch\n" : "ctorch.storage\n");
  pickle.raw(typed ? info.storage : "UntypedStorage");
  pickle.raw(
      std::string_view("\nX\x01\0\0\0"
                       "0X\x03\0\0\0"
                       "cpu",
                       15));
  pickle.number(typed ? numel : numel * info.itemsize);
  pickle.raw("tQ");
  pickle.number(0);
  pickle.tuple(sizes);
  pickle.tuple(strides);
  pickle.raw(
      "\x89"
      "ccollections\nOrderedDict\n)R");
  if (!typed) {
    pickle.raw("ctorch\n");
    pickle.raw(info.name);
    pickle.raw("\n");
  }
  pickle.raw("tR.");
  return pickle.nbytes();
}

Result<PickledTensor> parse_tensor_pickle(Bytes pickle) {
  if (ssize(pickle) > kMaxParsedPickleNbytes) {
    return not_plain(str_cat("a pickle of ", pickle.size(), " bytes"));
  }
  return TensorReader(pickle).read();
}

}  // namespace torch_ckpt
