#pragma once

// The stack and memo of an unpickler that makes data: Python values that are put into one another.
//
// What is made is a tree by construction. A container can be filled only from when it is made until
// it is put into another, so it never holds itself; depth and the number of values that a walk
// meets are counted on the way. Used by `metadata_unpickler`, which knows opcodes and records.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace torch_ckpt {

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

// The status of a call into Python that has raised: the exception says what.
inline Status python_error() { return internal_error("a Python exception is set"); }

class ValueStack {
 public:
  enum class Kind : uint8_t {
    kPlain,   // Nothing can be done to it.
    kText,    // A str.
    kInt,     // An int of 64 bits.
    kTuple,   //
    kList,    //
    kDict,    //
    kRecord,  // An instance; `global` says of what.
    kGlobal,  // What `global` names, to be called; never part of another value.
  };

  struct Value {
    PyRef object;         // None for a dict without items.
    uint32_t weight = 1;  // How many values a walk meets here.
    uint8_t depth = 1;
    Kind kind = Kind::kPlain;
    uint8_t global = 0;
    bool is_open = false;      // A list, dict or record that may still be filled.
    bool is_complete = true;   // Not a record without its fields.
    bool is_hashable = false;  // May be the key of a dict.
    uint32_t memo = kNoMemo;   // Its place in the memo, while it is open.
  };

  static constexpr int kMaxDepth = 64;

  explicit ValueStack(uint32_t max_weight) : max_weight_(max_weight) {}

  // Each of these fails with kCorruption for what no pickler writes, with kUnsupported for what is
  // not allowed, and with python_error().

  // Takes the reference, which a failed call into Python leaves null.
  Status push(Kind kind, PyObject* new_reference);
  void push_empty_dict();
  void push(Value value) { stack_.push_back(std::move(value)); }
  void push_mark() { marks_.push_back(stack_.size()); }

  // Checks that `count` values lie above the last mark.
  Status need(size_t count) const;
  // Requires: need(1).
  Value& top() { return stack_.back(); }
  Value pop();

  // Where the values above the last mark begin; takes the mark away.
  Status pop_mark(size_t* begin);
  size_t size() const { return stack_.size(); }
  // Checks that `count` values lie between the last mark and `begin`.
  Status need_below(size_t begin, size_t count) const;
  Value& at(size_t i) { return stack_[i]; }
  void cut(size_t size) { stack_.resize(size); }

  // Makes a tuple of the values from `begin`; appends them to the list below them; or puts them,
  // keys and values in turn, into the dict below them.
  Status make_tuple(size_t begin);
  Status append(size_t begin);
  Status set_items(size_t begin);

  // Makes `child` part of `parent`: from now on it stays as it is.
  Status close(Value& child, Value* parent);

  // Makes sure that a dict which is never made, only its items used, is not recalled.
  void forget(const Value& dict);

  Status remember(uint64_t key);
  Status remember() { return remember(memo_.size()); }
  Status recall(uint64_t key);

  // The one value that is left.
  Status finish(PyRef* result);

 private:
  static constexpr uint32_t kNoMemo = std::numeric_limits<uint32_t>::max();

  // What of a Value is remembered; of an open one, where it is on the stack.
  struct Memory {
    PyRef object;
    uint32_t weight_or_place;
    uint8_t depth;
    Kind kind;
    uint8_t global;
    bool is_open : 1;
    bool is_hashable : 1;
  };

  Status seal(Value& value);

  uint32_t max_weight_;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;  // Sizes of the stack.
  std::vector<Memory> memo_;
};

}  // namespace torch_ckpt
