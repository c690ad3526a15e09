#include "format/pickle_tree.h"

#include <algorithm>

#include "format/pickle_reader.h"

namespace torch_ckpt {
namespace {

using Kind = PickleNode::Kind;

using namespace pickle_opcodes;

}  // namespace

// The stack machine. Each opcode adds at most one node, so the length of the pickle bounds every
// vector here.
class PickleMachine {
 public:
  explicit PickleMachine(Bytes pickle) : reader_(pickle) {
    tree_.nodes_.reserve(32);
    tree_.children_.reserve(32);
    stack_.reserve(32);
    memo_.reserve(16);
  }

  Result<PickleTree> run() {
    while (true) {
      uint8_t op;
      if (!reader_.read(&op)) return broken("it is cut off");
      if (op == kStop) break;
      const Status status = step(op);
      if (!status.ok()) return status;
    }
    if (stack_.size() != 1 || stack_[0] == kMarkId) return broken("it does not end in one value");
    if (!reader_.at_end()) return broken("bytes follow its end");
    tree_.root_ = stack_[0];
    return std::move(tree_);
  }

 private:
  static constexpr int32_t kMarkId = -1;

  Status broken(std::string_view why) const {
    return corruption("not a pickle: ", why, ", at byte ", reader_.position());
  }

  Status push(const PickleNode& node) {
    stack_.push_back(static_cast<int32_t>(tree_.nodes_.size()));
    tree_.nodes_.push_back(node);
    return ok_status();
  }

  Status push_number(Kind kind, int64_t number) { return push({.kind = kind, .number = number}); }

  // Replaces the top `count` values by one node that has them as children.
  Status push_parent(Kind kind, size_t count) {
    if (stack_.size() < count) return broken("its stack runs out");
    const auto from = stack_.end() - static_cast<std::ptrdiff_t>(count);
    if (std::find(from, stack_.end(), kMarkId) != stack_.end()) {
      return broken("it uses a mark as a value");
    }
    const PickleNode node{.kind = kind,
                          .first_child = static_cast<int32_t>(tree_.children_.size()),
                          .child_count = static_cast<int32_t>(count)};
    tree_.children_.insert(tree_.children_.end(), from, stack_.end());
    stack_.erase(from, stack_.end());
    return push(node);
  }

  Status push_tuple_from_mark() {
    const auto mark = std::find(stack_.rbegin(), stack_.rend(), kMarkId);
    if (mark == stack_.rend()) return broken("a tuple has no mark");
    const auto count = static_cast<size_t>(mark - stack_.rbegin());
    stack_.erase(std::next(mark).base());
    return push_parent(Kind::kTuple, count);
  }

  Status push_stack_global() {
    if (stack_.size() < 2 || stack_.back() == kMarkId || stack_[stack_.size() - 2] == kMarkId) {
      return broken("its stack runs out");
    }
    const PickleNode& name = tree_.nodes_[static_cast<size_t>(stack_.back())];
    const PickleNode& module = tree_.nodes_[static_cast<size_t>(stack_[stack_.size() - 2])];
    if (name.kind != Kind::kText || module.kind != Kind::kText) {
      return broken("a global is not named by text");
    }
    const PickleNode node{.kind = Kind::kGlobal, .text = module.text, .name = name.text};
    stack_.resize(stack_.size() - 2);
    return push(node);
  }

  Status put(uint64_t key) {
    if (stack_.empty() || stack_.back() == kMarkId) return broken("there is nothing to remember");
    if (key >= PickleTree::kMaxMemo) return unsupported("the pickle remembers too many values");
    if (key >= memo_.size()) memo_.resize(static_cast<size_t>(key) + 1, kMarkId);
    memo_[static_cast<size_t>(key)] = stack_.back();
    return ok_status();
  }

  Status get(uint64_t key) {
    if (key >= memo_.size() || memo_[static_cast<size_t>(key)] == kMarkId) {
      return broken("it recalls a value it never had");
    }
    stack_.push_back(memo_[static_cast<size_t>(key)]);
    return ok_status();
  }

  // An opcode with an argument that fits an integer of type T: `use` it.
  template <typename T, typename Use>
  Status with(Use use) {
    T argument;
    if (!reader_.read(&argument)) return broken("it is cut off");
    return use(argument);
  }

  Status push_text(uint64_t nbytes) {
    PickleNode node{.kind = Kind::kText};
    if (!reader_.read_bytes(nbytes, &node.text)) return broken("it is cut off");
    return push(node);
  }

  Status push_long(uint8_t nbytes) {
    std::string_view digits;
    if (!reader_.read_bytes(nbytes, &digits)) return broken("it is cut off");
    if (nbytes > sizeof(int64_t)) return unsupported("the pickle holds a number beyond 64 bits");
    return push_number(Kind::kInt, pickled_long(digits));
  }

  Status push_global() {
    PickleNode node{.kind = Kind::kGlobal};
    if (!reader_.read_line(&node.text) || !reader_.read_line(&node.name))
      return broken("it is cut off");
    return push(node);
  }

  Status step(uint8_t op);

  PickleReader reader_;
  PickleTree tree_;
  std::vector<int32_t> stack_;  // Node numbers, or kMarkId.
  std::vector<int32_t> memo_;   // Node numbers, or kMarkId where nothing was put.
};

Status PickleMachine::step(uint8_t op) {
  const auto push_int = [this](auto number) { return push_number(Kind::kInt, number); };
  const auto put_at = [this](auto key) { return put(key); };
  const auto get_at = [this](auto key) { return get(key); };
  const auto push_text_of = [this](auto nbytes) { return push_text(nbytes); };
  switch (op) {
    case kProto:
      return with<uint8_t>([this](uint8_t version) {
        return version <= kNewestPickleProtocol ? ok_status()
                                                : broken("its protocol does not exist");
      });
    case kFrame:
      return with<uint64_t>([](uint64_t) { return ok_status(); });
    case kMark:
      stack_.push_back(kMarkId);
      return ok_status();
    case kNone:
      return push({.kind = Kind::kNone});
    case kNewTrue:
    case kNewFalse:
      return push_number(Kind::kBool, op == kNewTrue ? 1 : 0);
    case kBinInt:
      return with<int32_t>(push_int);
    case kBinInt1:
      return with<uint8_t>(push_int);
    case kBinInt2:
      return with<uint16_t>(push_int);
    case kLong1:
      return with<uint8_t>([this](uint8_t nbytes) { return push_long(nbytes); });
    case kShortBinUnicode:
      return with<uint8_t>(push_text_of);
    case kBinUnicode:
      return with<uint32_t>(push_text_of);
    case kBinUnicode8:
      return with<uint64_t>(push_text_of);
    case kGlobal:
      return push_global();
    case kStackGlobal:
      return push_stack_global();
    case kEmptyDict:
      return push({.kind = Kind::kEmptyDict});
    case kEmptyTuple:
      return push_parent(Kind::kTuple, 0);
    case kTuple1:
    case kTuple2:
    case kTuple3:
      return push_parent(Kind::kTuple, static_cast<size_t>(op - kTuple1) + 1);
    case kTuple:
      return push_tuple_from_mark();
    case kBinPersId:
      return push_parent(Kind::kPersistentId, 1);
    case kReduce:
      return push_parent(Kind::kCall, 2);
    case kBinPut:
      return with<uint8_t>(put_at);
    case kLongBinPut:
      return with<uint32_t>(put_at);
    case kMemoize:
      // Python numbers by how many values are remembered; torch's pickler never skips a number.
      return put(memo_.size());
    case kBinGet:
      return with<uint8_t>(get_at);
    case kLongBinGet:
      return with<uint32_t>(get_at);
    default:
      if (is_pickle_opcode(op))
        return unsupported("the pickle describes more than one plain tensor");
      return broken("it has an opcode that does not exist");
  }
}

Result<PickleTree> PickleTree::parse(Bytes pickle) {
  if (ssize(pickle) > kMaxNbytes) {
    return unsupported("a pickle of ", pickle.size(), " bytes describes more than one tensor");
  }
  return PickleMachine(pickle).run();
}

}  // namespace torch_ckpt
