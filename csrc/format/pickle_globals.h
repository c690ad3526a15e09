#pragma once

// Lists the globals that a pickle names: the classes and functions that unpickling would import.
//
// Iterates over the opcodes and executes none. FastWriter calls it on each pickled object, to warn
// of classes that a load would reject. A load calls it to list all of them in one error.

#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Module and name. Both point into the pickle.
using GlobalName = std::pair<std::string_view, std::string_view>;

// Returns the globals in the order of the pickle, with repetitions. Bytes after the STOP opcode are
// ignored. Time is linear in the length of the pickle; lengths stated in it are never allocated.
//
// Errors: kCorruption for bytes that are no pickle; kUnsupported for opcodes that no load of
// objects supports. These are STACK_GLOBAL and the extension registry, which torch.save never
// writes, and POP and POP_MARK.
Result<std::vector<GlobalName>> pickle_globals(Bytes pickle);

}  // namespace torch_ckpt
