#pragma once

// ValueStack: stack and memo of an unpickler that builds plain data. Used by `metadata_unpickler`.
//
// The result is a tree by construction. A container accepts items only until it is put into another
// container, so it never contains itself. The stack tracks depth and number of nodes of each value.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace torch_ckpt {

inline Status broken(std::string_view why) { return corruption(why); }
inline Status refused(std::string_view what) { return unsupported("the pickle has ", what); }

// An owned reference to a Python object, or none.
class PyRef {
 public:
  PyRef() = default;
  static PyRef steal(PyObject* object) { return PyRef(object); }
  static PyRef share(PyObject* object) {
    Py_XINCREF(object);
    return PyRef(object);
  }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;
  ~PyRef() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit PyRef(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Status of a failed call into Python. The pending Python exception describes the error.
inline Status python_error() { return internal_error("a Python exception is set"); }

class ValueStack {
 public:
  enum class Kind : uint8_t {
    kPlain,   // A value that no opcode changes or calls.
    kText,    // A str.
    kInt,     // An int of 64 bits.
    kTuple,   //
    kList,    //
    kDict,    //
    kRecord,  // An instance of the class `global`.
    kGlobal,  // The callable `global`; never contained in another value.
    kMember,  // The arguments of a call that returns `object`; never contained in another value.
  };

  struct Value {
    PyRef object;         // Empty for a dict without items.
    uint32_t weight = 1;  // Number of nodes in the value's tree.
    uint8_t depth = 1;    // Depth of the value's tree.
    Kind kind = Kind::kPlain;
    uint8_t global = 0;
    bool is_open = false;      // Whether a list, dict or record may still be filled.
    bool is_complete = true;   // False for a record without its fields.
    bool is_hashable = false;  // Whether the value may be a dict key.
    uint32_t memo = kNoMemo;   // Memo number of an open value.
  };

  static constexpr int kMaxDepth = 64;

  explicit ValueStack(uint32_t max_weight) : max_weight_(max_weight) {}

  // Errors of the following functions: kCorruption for opcodes that no pickler writes, kUnsupported
  // for values that are not allowed, and python_error().

  // Steals the reference. A null reference is python_error().
  Status push(Kind kind, PyObject* new_reference);
  void push_empty_dict();
  void push(Value value) { stack_.push_back(std::move(value)); }
  void push_mark() { marks_.push_back(stack_.size()); }

  // Checks that there are `count` values above the last mark.
  Status need(size_t count) const;
  // Requires: need(1).
  Value& top() { return stack_.back(); }
  Value pop();

  // Pops the last mark, and returns in `*begin` the position of the first value above it.
  Status pop_mark(size_t* begin);
  size_t size() const { return stack_.size(); }
  // Checks that there are `count` values between the last mark and `begin`.
  Status need_below(size_t begin, size_t count) const;
  Value& at(size_t i) { return stack_[i]; }
  void cut(size_t size) { stack_.resize(size); }

  // Replaces the values from `begin` on by a tuple of them.
  Status make_tuple(size_t begin);
  // Moves the values from `begin` on to the list below them.
  Status append(size_t begin);
  // Moves the alternating keys and values from `begin` on to the dict below them.
  Status set_items(size_t begin);

  // Counts nodes that a call creates. The nodes of all calls together have the limit of the result,
  // since arguments can be recalled for many calls before a container counts their results.
  Status charge(uint64_t weight);

  // Freezes `child`, and adds its depth and weight to those of `parent`.
  Status close(Value& child, Value* parent);

  // Invalidates the memo entry of a dict that is never created, because only its items are used.
  void forget(const Value& dict);

  // Memoises the top of the stack under the next number, which must equal `key`.
  Status remember(uint64_t key);
  Status remember() { return remember(memo_.size()); }
  // Pushes the memoised value.
  Status recall(uint64_t key);

  // Returns the only value on the stack.
  Status finish(PyRef* result);

 private:
  static constexpr uint32_t kNoMemo = std::numeric_limits<uint32_t>::max();

  // A memoised Value.
  struct Memory {
    PyRef object;
    uint32_t weight_or_place;  // Weight; for an open value, its position on the stack.
    uint8_t depth;
    Kind kind;
    uint8_t global;
    bool is_open : 1;
    bool is_hashable : 1;
  };

  // Ends the filling of a container or record.
  Status freeze(Value& value);

  uint32_t max_weight_;
  uint32_t charged_ = 0;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;  // Size of the stack at each mark.
  std::vector<Memory> memo_;
};

}  // namespace torch_ckpt
