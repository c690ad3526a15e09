#pragma once

// Unlocked: releases the GIL within a scope. owned_by_any_thread: a Python object that any thread
// may release.
//
// When the interpreter ends, Python ends each other thread that acquires the GIL by `pthread_exit`,
// which unwinds the thread. A destructor must not be left that way: C++ would end the process by
// SIGABRT. Later, there is no GIL any more. A daemon thread of this package may be in native code
// at that time, so such a thread is suspended instead, and the process ends without it.

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>

namespace torch_ckpt {

// Whether the interpreter ends, or has ended.
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
  const bool ends_python_;  // Whether this thread ends the interpreter. No other one gets the GIL.
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
