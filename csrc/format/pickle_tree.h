#pragma once

// Reads a pickle as data, without running anything it asks for.
//
// The pickle inside a stored tensor is a program for a stack machine that ends by calling
// functions. `PickleTree` runs only its pushes and pops: a call stays in the tree as the name of
// the function and its arguments, for `tensor_pickle` to recognise. It knows the opcodes that any
// torch version uses for one plain tensor; a pickle with others is torch's to read.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// One value. Text points into the pickle.
struct PickleNode {
  enum class Kind {
    kNone,
    kBool,    // `number` is 0 or 1.
    kInt,     // `number`.
    kText,    // `text`.
    kGlobal,  // The Python object `text`.`name`.
    kTuple,   // Its elements are the children.
    kEmptyDict,
    kPersistentId,  // One child, the id.
    kCall,          // Two children: what is called, and its arguments.
  };

  Kind kind = Kind::kNone;
  int64_t number = 0;
  std::string_view text = {};
  std::string_view name = {};
  int32_t first_child = 0;
  int32_t child_count = 0;
};

// A tree that may share branches (the pickle's memo), so walk it only to a known depth. A value;
// the pickle's bytes must outlive it.
class PickleTree {
 public:
  // Longer or more intricate pickles than these do not describe one tensor.
  static constexpr int64_t kMaxNbytes = 65536;
  static constexpr int64_t kMaxMemo = 4096;

  // Errors: kCorruption for bytes that are no pickle; kUnsupported for a sound pickle of something
  // other than one plain tensor.
  static Result<PickleTree> parse(Bytes pickle);

  const PickleNode& root() const { return nodes_[static_cast<size_t>(root_)]; }

  // Requires: 0 <= i < node.child_count.
  const PickleNode& child(const PickleNode& node, int64_t i) const {
    return nodes_[static_cast<size_t>(children_[static_cast<size_t>(node.first_child + i)])];
  }

 private:
  friend class PickleMachine;
  PickleTree() = default;

  std::vector<PickleNode> nodes_;
  std::vector<int32_t> children_;
  int32_t root_ = 0;
};

}  // namespace torch_ckpt
