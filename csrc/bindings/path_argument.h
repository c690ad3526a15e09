#pragma once

// The conversion of a str, bytes or os.PathLike to a path. In place of pybind11's own, which turns
// every error of `__fspath__` into a TypeError. That of pathlib is Python code, in which an
// interrupt may arrive.

#include <pybind11/pybind11.h>

#include <filesystem>
#include <string>

namespace pybind11::detail {

template <>
struct type_caster<std::filesystem::path> {
  // Returns false for another type. Other errors are raised as they are.
  bool load(handle from, bool) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(from.ptr(), &encoded) == 0) {
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw error_already_set();
      PyErr_Clear();
      return false;
    }
    value = reinterpret_steal<bytes>(encoded).operator std::string();
    return true;
  }

  PYBIND11_TYPE_CASTER(std::filesystem::path, const_name("os.PathLike | str | bytes"));
};

}  // namespace pybind11::detail
