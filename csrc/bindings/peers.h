#pragma once

// The ranks of a process group, as the engine's peers.

#include <pybind11/pybind11.h>

namespace torch_ckpt {

void bind_peers(pybind11::module_& module);

}  // namespace torch_ckpt
