#pragma once

// GlobalCalls: evaluates the opcodes of an unpickler that name, call or build globals.
//
// A vocabulary (metadata_unpickler.h) defines the meaning of each supported global. Records are
// created as by object.__new__. Their fields are set one by one, and have the types that the
// vocabulary allows. No method of a record's class runs.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "bindings/value_stack.h"

namespace torch_ckpt {

class GlobalCalls {
 public:
  // Requires: both arguments outlive this object.
  GlobalCalls(PyObject* vocabulary, ValueStack* stack) : vocabulary_(vocabulary), stack_(stack) {}

  // Replaces the names of a module and a global on the stack by the global.
  Status push();

  // Returns whether the stack ends in a `member` function, a choice and a text.
  bool is_member_next();

  // Replaces the choice and the text on the stack by arguments of the `member` function below them.
  Status choose_member();

  // Replaces a function and its argument tuple on the stack by the result of the call.
  Status call();

  // Replaces a record class and an empty tuple on the stack by a record without fields.
  Status make_record();

  // Sets the fields of a record from the names and values on the stack from `begin` on. The dict
  // below them is empty, and the record is below the dict. Pops everything above the record.
  Status build_from_items(size_t begin);

  // Sets the fields of a record from the tuple above it, which has a value for every field. Pops
  // the tuple.
  Status build_from_tuple();

 private:
  // An entry of the vocabulary, with borrowed references.
  struct Global {
    enum class How : uint8_t { kSizes, kChoice, kMember, kText, kRecord };

    How how = How::kText;
    PyObject* target = nullptr;
    PyObject* fields = nullptr;
    uint64_t required = 0;  // Bit set of the mandatory fields.
    bool is_hashable = false;
    std::string name;
  };

  Status add_global(PyObject* entry, std::string name);
  // Checks that the value at `at` is an open record, and returns its class in `*global`.
  Status open_record(size_t at, const Global** global);
  // Sets one field, and its bit in `*found`.
  static Status set_field(const Global& global, PyObject* record, PyObject* name, PyObject* value,
                          uint64_t* found);

  PyObject* vocabulary_;
  ValueStack* stack_;
  std::vector<Global> globals_;  // Globals of this pickle; Value::global is a position in it.
};

}  // namespace torch_ckpt
