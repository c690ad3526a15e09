#pragma once

// Builds the Python value of a DCP `.metadata` pickle without running anything it asks for.
//
// Python's own unpickler cannot be confined to data: restricted to a few classes, it still sets
// attributes of the classes themselves, hashes tuples deep enough to overflow the stack, and
// allocates whatever length a pickle states. This stack machine knows the opcodes of plain data and
// of the records that a vocabulary lists, and builds these itself: no `__setstate__`, no
// constructor of a record, no import. Called by torch_ckpt/formats/pickles.py, which has the
// vocabulary.
//
// Free of pybind11, so that fuzz/pickle_fuzzer.cc can hold it without the rest of the bindings.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Builds the value of `pickle`. `vocabulary` is a dict from (module, name) to what the global
// means:
//
//   ("value", object)          the object itself, a dtype say
//   ("sizes", class)           may be called with one tuple of numbers that are not negative
//   ("choice", dict)           may be called with one str or int, a key of the dict
//   ("text", class)            may be called with any number of str
//   ("record", class, fields, required, hashable)
//                              a dataclass without slots. `fields` maps the names of its fields to
//                              tuples of the exact types that each may have, () for any; of these
//                              the first `required` must be there. Instances of a hashable class
//                              may be keys of a dict once all their fields are set.
//
// Returns a new reference. On failure returns nullptr, with either a Python exception set or
// `*status` not OK: kCorruption for bytes that are no pickle, kUnsupported for a pickle of anything
// else. Work and memory are linear in the length of the pickle, and the value is a tree of bounded
// depth: it holds no cycle, and is not much larger when walked than it is in the file.
// Requires: the GIL is held.
PyObject* unpickle_metadata(Bytes pickle, PyObject* vocabulary, Status* status);

}  // namespace torch_ckpt
