#pragma once

// Unlocked: releases the GIL within a scope. owned_by_any_thread: a Python object that any thread
// may release.
//
// During finalization, Python calls `pthread_exit` in every other thread that acquires the GIL,
// which unwinds the thread. Unwinding out of a destructor would end the process by SIGABRT. After
// finalization, the GIL no longer exists. A daemon thread of this package may be in native code at
// that time, so such a thread is suspended instead, and the process ends without it.

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>

namespace torch_ckpt {

// Whether the interpreter is being finalized, or has been.
inline bool is_python_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool ends = Py_IsFinalizing() != 0;
#else
  const bool ends = _Py_IsFinalizing() != 0;
#endif
  return ends || Py_IsInitialized() == 0;
}

// Requires: the caller owns the GIL.
class Unlocked {
 public:
  Unlocked() : ends_python_(is_python_ending()), state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      while (!ends_python_ && is_python_ending()) ::pause();
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) ::pause();  // Python has begun to end since.
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  // Whether this thread finalizes the interpreter and may acquire the GIL.
  const bool ends_python_;
  PyThreadState* const state_;
};

// Returns shared ownership of an object. The last owner needs no GIL.
inline std::shared_ptr<PyObject> owned_by_any_thread(pybind11::object object) {
  return {object.release().ptr(), [](PyObject* last) {
            if (is_python_ending()) return;  // The process ends, and so does the object.
            try {
              const PyGILState_STATE state = PyGILState_Ensure();
              Py_XDECREF(last);
              PyGILState_Release(state);
            } catch (abi::__forced_unwind&) {
              for (;;) ::pause();  // Python has begun to end since.
            }
          }};
}

}  // namespace torch_ckpt
