#pragma once

// Shared declarations of the bindings of `_native`. Each bind_* function registers the Python
// classes of one source file; module.cc calls them.

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/block_sums.h"
#include "base/niceness.h"
#include "bindings/gil.h"
#include "bindings/tensor_view.h"
#include "engine/live_tensor.h"
#include "engine/save/save_job.h"
#include "io/file_system.h"

namespace torch_ckpt {

// Runs `work` with the GIL released.
template <typename Work>
auto without_gil(Work&& work) {
  const Unlocked unlocked;
  return std::forward<Work>(work)();
}

// Runs `work` with the GIL released and at a higher niceness. A thread with the GIL must not run at
// low priority, since other threads wait for the GIL.
template <typename Work>
auto nicely_without_gil(int niceness, Work&& work) {
  return without_gil([&] { return run_at_niceness(niceness, std::forward<Work>(work)); });
}

// Deletes an object without the GIL. The destructor of a job waits for requests in flight, and a
// request to a store needs the GIL.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* object) const {
    const Unlocked unlocked;
    delete object;
  }
};
template <typename T>
using UnlockedPtr = std::unique_ptr<T, DeleteWithoutGil<T>>;

// Queue, direct, registered_buffers, reasons.
using PyIoMode = std::tuple<std::string, bool, bool, std::vector<std::string>>;
PyIoMode to_python(const IoMode& mode);

inline SaveOptions save_options(bool direct, bool sync, int niceness) {
  return {.caching = direct ? Caching::kDirect : Caching::kBuffered,
          .sync = sync,
          .niceness = niceness};
}

// Encodes the block sums of a file, 8 bytes each.
pybind11::bytes to_bytes(const BlockSums& sums);

void bind_codec(pybind11::module_& module);
void bind_copy_job(pybind11::module_& module);
void bind_exchange(pybind11::module_& module);
void bind_file_system(pybind11::module_& module);
void bind_index(pybind11::module_& module);
void bind_object_store(pybind11::module_& module);
void bind_save_job(pybind11::module_& module);
void bind_snapshot(pybind11::module_& module);
void bind_load_job(pybind11::module_& module);
void bind_shared_file_job(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_slot(pybind11::module_& module);
void bind_verify_job(pybind11::module_& module);
void bind_work(pybind11::module_& module);

}  // namespace torch_ckpt
