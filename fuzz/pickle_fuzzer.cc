// Unpickles arbitrary bytes as `.metadata`. The result must be a value or a documented error, and
// no code may run.
//
// The unpickler is compiled into the target, so its branches guide the fuzzer and sanitizers cover
// it. Vocabulary and checks are those of torch_ckpt. An audit hook aborts the process if Python
// imports, compiles, opens or starts anything during a load.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <string_view>

#include "bindings/metadata_unpickler.h"
#include "format/pickle_globals.h"

namespace torch_ckpt {
namespace {

bool is_loading = false;

int forbid_events(const char* event, PyObject*, void*) {
  if (!is_loading) return 0;
  if (std::string_view(event) == "builtins.id") return 0;  // The repr of a dataclass calls id().
  std::cerr << "code ran: audit event " << event << std::endl;
  std::abort();
}

[[noreturn]] void fail(const char* what) {
  if (PyErr_Occurred() != nullptr) PyErr_Print();
  std::cerr << what << std::endl;
  std::abort();
}

void start_python() {
  if (PySys_AddAuditHook(forbid_events, nullptr) != 0) fail("no audit hook");
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  config.install_signal_handlers = 0;
  // Python locates its environment relative to the program name.
  PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, TORCH_CKPT_PYTHON);
  if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
  PyConfig_Clear(&config);
  if (PyStatus_Exception(status)) fail("Python does not start");
}

PyObject* vocabulary = nullptr;
PyObject* check = nullptr;

// Defines check() in Python, which tests the guarantees for callers.
constexpr const char* kSetUp = R"(
import gc, sys
sys.path.insert(0, SOURCE_DIR)
from torch_ckpt.formats import metadata, pickles
gc.disable()

def walk(value, budget, depth=0):
    "Asserts that depth and size of a value are within the limits for its pickle."
    assert depth <= 64, "too deep"
    stack = [value]
    count = 0
    while stack:
        value = stack.pop()
        count += 1
        assert count <= budget, "too many nodes"
        if type(value) in (list, tuple):
            stack.extend(value)
        elif type(value) is dict:
            stack.extend(value)
            stack.extend(value.values())
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("torch.distributed"):
            stack.extend(vars(value).values())

def check(value, nbytes):
    walk(value, 4096 + 64 * nbytes)
    repr(value)
    try:
        metadata.check_metadata(value)
    except ValueError:
        pass
)";

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  using namespace torch_ckpt;
  start_python();
  PyObject* globals = PyModule_GetDict(PyImport_AddModule("__main__"));
  PyObject* source = PyUnicode_FromString(TORCH_CKPT_SOURCE_DIR);
  PyDict_SetItemString(globals, "SOURCE_DIR", source);
  if (PyRun_String(kSetUp, Py_file_input, globals, globals) == nullptr) fail("no torch_ckpt");
  PyObject* pickles = PyDict_GetItemString(globals, "pickles");
  vocabulary = PyObject_GetAttrString(pickles, "_VOCABULARY");
  check = PyDict_GetItemString(globals, "check");
  if (vocabulary == nullptr || check == nullptr) fail("no vocabulary");
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  is_loading = true;
  Status status;
  const Bytes pickle(reinterpret_cast<const std::byte*>(data), size);
  const StatusCode listed = pickle_globals(pickle).status().code();
  if (listed != StatusCode::kOk && listed != StatusCode::kCorruption &&
      listed != StatusCode::kUnsupported) {
    fail("pickle_globals returned an undocumented error");
  }
  PyObject* value = unpickle_metadata(pickle, vocabulary, &status);
  if (value != nullptr) {
    PyObject* checked = PyObject_CallFunction(check, "On", value, static_cast<Py_ssize_t>(size));
    if (checked == nullptr) fail("the value violates a guarantee");
    Py_DECREF(checked);
    Py_DECREF(value);
  } else if (PyErr_Occurred() != nullptr) {
    fail("an undocumented exception");
  } else if (status.code() != StatusCode::kCorruption &&
             status.code() != StatusCode::kUnsupported) {
    fail(status.message().c_str());
  }
  is_loading = false;
  return 0;
}
