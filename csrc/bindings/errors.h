#pragma once

// Converts a Status to a Python exception. All bindings use it.

#include <pybind11/pybind11.h>

#include <string>

#include "base/status.h"

namespace torch_ckpt {

// Decodes a text that may quote bytes of a file or a path. Invalid UTF-8 is replaced.
pybind11::str to_text(const std::string& text);

// Retains a KeyboardInterrupt, or SystemExit of a signal handler, which is not a failure. The next
// raise_if_error of this thread raises it, or the interpreter soon. Requires: the caller owns the
// GIL.
void retain_interrupt(const pybind11::error_already_set& error);

// Raises the exception that `retain_interrupt` has retained, or that of torch_ckpt.errors for
// `status`, unless it is OK. Requires: the caller owns the GIL.
void raise_if_error(const Status& status);

// Returns the value, or raises the exception for the status. Requires: the caller owns the GIL.
template <typename T>
T value_or_raise(Result<T> result) {
  raise_if_error(result.status());
  return std::move(*result);
}

}  // namespace torch_ckpt
