#pragma once

// Builds the Python value of a DCP `.metadata` pickle without executing the pickle.
//
// Python's unpickler is unsafe even if restricted to a few classes. It still sets attributes of the
// classes themselves, hashes tuples deep enough to overflow the stack, and allocates any length
// that a pickle states. This stack machine supports the opcodes of plain data and of the records in
// a vocabulary. It imports nothing, and calls no `__setstate__` and no constructor of a record.
// Called by torch_ckpt/formats/pickles.py, which defines the vocabulary.
//
// Does not use pybind11, so that fuzz/pickle_fuzzer.cc can compile it without the other bindings.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Builds the value of `pickle`, and ignores bytes behind its end, as Python does. `vocabulary` is a
// dict from (module, name) to the meaning of the global:
//
//   ("value", object)          the object itself, for example a dtype
//   ("sizes", class)           callable with one tuple of non-negative numbers
//   ("choice", dict)           callable with one str or int, a key of the dict
//   ("member", object)         callable with a choice and a str, a key of its dict
//   ("text", class)            callable with any number of str
//   ("record", class, fields, required, hashable)
//                              a dataclass without slots. `fields` maps each field name to a tuple
//                              of the exact types that the field may have, or () for any type. The
//                              first `required` fields are mandatory. Instances of a hashable class
//                              may be dict keys once all their fields are set.
//
// Returns a new reference. On failure returns nullptr, and either sets a Python exception or sets
// `*status` to an error: kCorruption for bytes that are no pickle, kUnsupported for any other
// pickle. Time and memory are linear in the length of the pickle. The value is a tree of bounded
// depth, and the number of its nodes is linear in the length of the pickle.
// Requires: the caller owns the GIL.
PyObject* unpickle_metadata(Bytes pickle, PyObject* vocabulary, Status* status);

}  // namespace torch_ckpt
