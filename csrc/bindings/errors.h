#pragma once

// The one place where a Status becomes a Python exception.

#include <pybind11/pybind11.h>

#include <string>

#include "base/status.h"

namespace torch_ckpt {

// Text that may quote bytes of a file or a path, which need not be UTF-8.
pybind11::str to_text(const std::string& text);

// Raises the exception of torch_ckpt.errors that stands for `status`; returns only when it is OK.
// Requires: the GIL is held.
void raise_if_error(const Status& status);

// The value, or the exception of its status. Requires: the GIL is held.
template <typename T>
T value_or_raise(Result<T> result) {
  raise_if_error(result.status());
  return std::move(*result);
}

}  // namespace torch_ckpt
