#pragma once

// Lists the globals that a pickle names: the classes and functions that unpickling it would import.
//
// Walks over the opcodes and executes none. FastWriter calls it on each object that it has pickled,
// to warn of classes that a load would refuse; a load calls it to name all of them in one error.

#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

// Module and name. Both point into the pickle.
using PickleGlobal = std::pair<std::string_view, std::string_view>;

// The globals in the order of the pickle, repeated where it repeats them. `pickle` may be followed
// by other bytes. Takes time linear in the pickle and allocates nothing that it merely claims.
//
// Errors: kCorruption for bytes that are no pickle; kUnsupported where a name is computed on the
// stack (STACK_GLOBAL of protocol 4, the extension registry), which torch.save never writes, and
// where a value is dropped again, which no load of objects supports.
Result<std::vector<PickleGlobal>> pickle_globals(Bytes pickle);

}  // namespace torch_ckpt
