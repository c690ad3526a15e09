#include "format/tensor_pickle.h"

#include <algorithm>
#include <array>

#include "format/pickle_tree.h"

namespace torch_ckpt {
namespace {

using Kind = PickleNode::Kind;

// Appends pickle opcodes. Requires room for all of them.
class PickleWriter {
 public:
  explicit PickleWriter(MutableBytes out) : out_(out) {}

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

// Strides of a contiguous tensor, as torch states them: a size of 0 counts as 1. Returns the number
// of elements that makes, or nothing where a size is negative or the number does not fit.
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

bool is_global(const PickleNode& node, std::string_view module, std::string_view name) {
  return node.kind == Kind::kGlobal && node.text == module && node.name == name;
}

Result<Dims> read_dims(const PickleTree& tree, const PickleNode& node) {
  if (node.kind != Kind::kTuple) return not_plain("sizes or strides are not a tuple");
  if (node.child_count > kMaxDims) return not_plain("it has too many dimensions");
  Dims dims(static_cast<size_t>(node.child_count));
  for (int32_t d = 0; d < node.child_count; ++d) {
    const PickleNode& element = tree.child(node, d);
    if (element.kind != Kind::kInt) return not_plain("a size or stride is not a number");
    if (element.number < 0) return corruption("a tensor has the size or stride ", element.number);
    dims[static_cast<size_t>(d)] = element.number;
  }
  return dims;
}

// Whether a node is what torch saves for "no backward hooks".
bool is_no_hooks(const PickleTree& tree, const PickleNode& node) {
  if (node.kind == Kind::kNone || node.kind == Kind::kEmptyDict) return true;
  return node.kind == Kind::kCall && is_global(tree.child(node, 0), "collections", "OrderedDict") &&
         tree.child(node, 1).kind == Kind::kTuple && tree.child(node, 1).child_count == 0;
}

// The storage: ("storage", class, key, location, numel) behind a persistent id. With
// `dtype` empty the class names the element type, and numel counts elements; else it counts bytes.
Status read_storage(const PickleTree& tree, const PickleNode& node, std::optional<DType> dtype,
                    PickledTensor* tensor) {
  if (node.kind != Kind::kPersistentId) return not_plain("its storage is not a record");
  const PickleNode& id = tree.child(node, 0);
  if (id.kind != Kind::kTuple || id.child_count != 5) return not_plain("its storage is a view");
  const PickleNode& tag = tree.child(id, 0);
  const PickleNode& type = tree.child(id, 1);
  const PickleNode& key = tree.child(id, 2);
  const PickleNode& location = tree.child(id, 3);
  const PickleNode& numel = tree.child(id, 4);
  if (tag.kind != Kind::kText || tag.text != "storage" || key.kind != Kind::kText ||
      location.kind != Kind::kText || numel.kind != Kind::kInt) {
    return not_plain("its storage is of an unknown form");
  }
  if (numel.number < 0) return corruption("a storage has ", numel.number, " elements");
  if (dtype) {
    if (!is_global(type, "torch.storage", "UntypedStorage")) return not_plain("typed storage");
  } else {
    if (type.kind != Kind::kGlobal || type.text != "torch") return not_plain("untyped storage");
    dtype = dtype_from_storage(type.name);
    if (!dtype) return not_plain(type.name);
  }
  const bool counts_bytes = dtype_info(*dtype).storage.empty();
  const auto nbytes = checked_mul(numel.number, counts_bytes ? 1 : itemsize(*dtype));
  if (!nbytes) return corruption("a storage has ", numel.number, " elements");
  tensor->dtype = *dtype;
  tensor->storage_nbytes = *nbytes;
  tensor->storage_key = key.text;
  return ok_status();
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

  PickleWriter pickle(out);
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
  ASSIGN_OR_RETURN(const PickleTree tree, PickleTree::parse(pickle));
  const PickleNode& root = tree.root();
  if (root.kind != Kind::kCall) return not_plain("it is not rebuilt by a call");
  const PickleNode& function = tree.child(root, 0);
  const PickleNode& args = tree.child(root, 1);
  const bool typed = is_global(function, "torch._utils", "_rebuild_tensor_v2");
  if (!typed && !is_global(function, "torch._utils", "_rebuild_tensor_v3")) {
    return not_plain(function.name);
  }

  // (storage, storage_offset, sizes, strides, requires_grad, hooks[, dtype][, metadata])
  const int32_t required = typed ? 6 : 7;
  if (args.kind != Kind::kTuple || args.child_count < required) {
    return not_plain("its arguments are of an unknown form");
  }
  if (args.child_count > required + 1 ||
      (args.child_count == required + 1 && tree.child(args, required).kind != Kind::kNone)) {
    return not_plain("it carries metadata");
  }
  if (tree.child(args, 4).kind != Kind::kBool || !is_no_hooks(tree, tree.child(args, 5))) {
    return not_plain("it carries hooks");
  }

  PickledTensor tensor;
  std::optional<DType> dtype;
  if (!typed) {
    const PickleNode& type = tree.child(args, 6);
    if (type.kind == Kind::kGlobal && type.text == "torch") dtype = dtype_from_name(type.name);
    if (!dtype) return not_plain(type.name);
  }
  RETURN_IF_ERROR(read_storage(tree, tree.child(args, 0), dtype, &tensor));
  const PickleNode& offset = tree.child(args, 1);
  if (offset.kind != Kind::kInt) return not_plain("its storage offset is not a number");
  if (offset.number < 0) return corruption("a tensor has the storage offset ", offset.number);
  tensor.storage_offset = offset.number;
  ASSIGN_OR_RETURN(tensor.sizes, read_dims(tree, tree.child(args, 2)));
  ASSIGN_OR_RETURN(tensor.strides, read_dims(tree, tree.child(args, 3)));
  if (tensor.sizes.size() != tensor.strides.size()) {
    return corruption("a tensor has ", tensor.sizes.size(), " sizes but ", tensor.strides.size(),
                      " strides");
  }
  const auto numel = checked_numel(tensor.sizes);
  if (!numel || !checked_mul(*numel, itemsize(tensor.dtype))) {
    return corruption("a tensor has the sizes ", to_string(tensor.sizes));
  }
  return tensor;
}

}  // namespace torch_ckpt
