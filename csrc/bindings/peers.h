#pragma once

// Binds make_peers, which wraps a process group's backend as the engine's Peers.

#include <pybind11/pybind11.h>

namespace torch_ckpt {

void bind_peers(pybind11::module_& module);

}  // namespace torch_ckpt
