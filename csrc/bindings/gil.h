#pragma once

// Unlocked and Locked: release and acquire the GIL within a scope.
//
// When the interpreter ends, Python ends each thread that acquires the GIL by `pthread_exit`, which
// unwinds the thread. A destructor must not be left that way: C++ would end the process by SIGABRT.
// A daemon thread of this package may be in native code at that time, so these classes suspend such
// a thread instead. The process ends without it.

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <optional>

namespace torch_ckpt {

// Calls a function that acquires the GIL. Does not return if the interpreter has ended.
template <typename Acquire>
void acquire_or_suspend(Acquire&& acquire) {
  try {
    acquire();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();
  }
}

// Requires: the caller owns the GIL.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    acquire_or_suspend([&] { PyEval_RestoreThread(state_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// For any thread, also if it owns the GIL.
class Locked {
 public:
  Locked() {
    acquire_or_suspend([&] { locked_.emplace(); });
  }

 private:
  std::optional<pybind11::gil_scoped_acquire> locked_;
};

}  // namespace torch_ckpt
