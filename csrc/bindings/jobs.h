#pragma once

// The engine's jobs as Python classes, bound by module.cc.

#include <pybind11/pybind11.h>

#include <utility>

#include "io/file_system.h"

namespace torch_ckpt {

// Runs a piece of the engine with the GIL released; Python's threads go on meanwhile.
template <typename Work>
auto without_gil(Work&& work) {
  const pybind11::gil_scoped_release unlocked;
  return std::forward<Work>(work)();
}

// The file system of the machine. Lives as long as the process.
FileSystem& local_file_system();

void bind_save_job(pybind11::module_& module);
void bind_load_job(pybind11::module_& module);

}  // namespace torch_ckpt
