#pragma once

// Types and functions that the bindings of plans (plan.cc) and of writing (work.cc) share.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "base/bytes.h"
#include "bindings/tensor_view.h"
#include "plan/item.h"

namespace torch_ckpt {

// An ItemTable that the module `_tensor_view`, which uses torch, can fill.
struct PyItemTable final : TensorSink {
  ItemTable table;

  PyItemTable() = default;
  explicit PyItemTable(ItemTable from) : table(std::move(from)) {}
  Status add(const TensorItem& item) override;

 private:
  // Scratch memory of `add`, reused for every item.
  Facts facts_;
  Box box_;
};

// Returns a pointer to the table that shares ownership of `items`.
inline std::shared_ptr<const ItemTable> table_of(const std::shared_ptr<PyItemTable>& items) {
  return {items, &items->table};
}

// Dtype, memory format, requires_grad, pin_memory, sizes of the whole tensor.
using PyFacts = std::tuple<std::string, std::string, bool, bool, Dims>;

// Returns the facts of a tensor, or nullopt for an object.
std::optional<PyFacts> to_python(const Facts& facts);

inline pybind11::bytes to_bytes(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline Bytes view_of(const pybind11::bytes& bytes) {
  return as_bytes(static_cast<std::string_view>(bytes));
}

inline Bytes bytes_of(const pybind11::buffer_info& info) {
  return {static_cast<const std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

}  // namespace torch_ckpt
