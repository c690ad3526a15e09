#include "bindings/errors.h"

#include <pybind11/pybind11.h>

#include <utility>

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Returns the name of the class in torch_ckpt.errors for a code, or nullptr for ValueError.
const char* exception_name(StatusCode code) {
  switch (code) {
    case StatusCode::kNotFound:
      return "NotFoundError";
    case StatusCode::kMismatch:
      return "MismatchError";
    case StatusCode::kCorruption:
      return "CorruptionError";
    case StatusCode::kStorage:
      return "StorageError";
    case StatusCode::kUnsupported:
      return "UnsupportedError";
    case StatusCode::kCancelled:
      return "CancelledError";
    case StatusCode::kInvalidArgument:
      return nullptr;
    case StatusCode::kOk:
    case StatusCode::kInternal:
      break;
  }
  return "CheckpointError";
}

// The exception that `retain_interrupt` has retained for this thread.
thread_local PyObject* retained_interrupt = nullptr;

// Sets the exception that was retained, and returns whether there was one.
bool restore_interrupt() {
  PyObject* retained = std::exchange(retained_interrupt, nullptr);
  if (retained == nullptr) return false;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(retained)), retained);
  Py_DECREF(retained);
  return true;
}

// As the interpreter calls it, in the main thread.
int raise_retained(void*) { return restore_interrupt() ? -1 : 0; }

}  // namespace

void retain_interrupt(const py::error_already_set& error) {
  if (!error.matches(PyExc_KeyboardInterrupt) && !error.matches(PyExc_SystemExit)) return;
  Py_XSETREF(retained_interrupt, Py_NewRef(error.value().ptr()));
  Py_AddPendingCall(&raise_retained, nullptr);  // The caller of the engine may ignore its status.
}

py::str to_text(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

void raise_if_error(const Status& status) {
  if (restore_interrupt()) throw py::error_already_set();
  if (status.ok()) return;
  const char* name = exception_name(status.code());
  const py::str message = to_text(status.message());
  if (name == nullptr) {
    PyErr_SetObject(PyExc_ValueError, message.ptr());
    throw py::error_already_set();
  }

  const py::object type = py::module_::import("torch_ckpt.errors").attr(name);
  const bool has_errno = status.error_number() != 0 && (status.code() == StatusCode::kStorage ||
                                                        status.code() == StatusCode::kNotFound);
  const py::object error = has_errno ? type(message, status.error_number()) : type(message);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

}  // namespace torch_ckpt
