#pragma once

// The globals of a pickle that an unpickler knows, and all that can be done with them.
//
// A vocabulary (metadata_unpickler.h) says what each stands for. Records are made as object.__new__
// would make them and their fields are set one by one, of the types that the vocabulary allows; no
// method of their classes runs.

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
  // Both must outlive it.
  GlobalCalls(PyObject* vocabulary, ValueStack* stack) : vocabulary_(vocabulary), stack_(stack) {}

  // Replaces a module's and a global's name by the global.
  Status push();

  // Replaces a function and a tuple of arguments by what it returns; or a record's class and an
  // empty tuple by a record without its fields.
  Status call();
  Status make_record();

  // Sets the fields of a record from the names and values from `begin`, between which and the
  // record is an empty dict; or from a tuple above it that has a value for every field. Only the
  // record stays.
  Status build_from_items(size_t begin);
  Status build_from_tuple();

 private:
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

  Status learn(PyObject* entry, std::string name);
  Status open_record(size_t at, const Global** global);
  // Sets a bit of `*found` for the field.
  static Status set_field(const Global& global, PyObject* record, PyObject* name, PyObject* value,
                          uint64_t* found);

  PyObject* vocabulary_;
  ValueStack* stack_;
  std::vector<Global> globals_;  // Those seen; values name them by number.
};

}  // namespace torch_ckpt
