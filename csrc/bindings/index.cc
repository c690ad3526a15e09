#include "format/index_file.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "engine/open_checkpoint.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Name, length, sums of its blocks as to_bytes() gives them.
using PyFile = std::tuple<std::string, int64_t, py::bytes>;

// Offsets, sizes, file, offset, length, plain, transforms.
using PyBox = std::tuple<Dims, Dims, int64_t, int64_t, int64_t, bool, std::vector<std::string>>;

// FQN; of a tensor: dtype, memory format, requires_grad, pin_memory, sizes, of an object None;
// boxes.
using PyProperties = std::tuple<std::string, std::string, bool, bool, Dims>;
using PyEntry = std::tuple<std::string, std::optional<PyProperties>, std::vector<PyBox>>;

using PyPath = std::pair<std::string, std::vector<std::variant<std::string, int64_t>>>;

IndexedFile to_file(const PyFile& from) {
  const auto& [name, nbytes, sums] = from;
  IndexedFile out = {name, {}};
  out.sums.file_nbytes = nbytes;
  const auto raw = static_cast<std::string_view>(sums);
  out.sums.sums.resize(raw.size() / sizeof(uint64_t));
  if (!raw.empty()) std::memcpy(out.sums.sums.data(), raw.data(), raw.size());
  return out;
}

IndexedEntry to_entry(const PyEntry& from) {
  const auto& [fqn, properties, boxes] = from;
  IndexedEntry out;
  out.fqn = fqn;
  out.is_tensor = properties.has_value();
  if (properties) {
    std::tie(out.dtype, out.memory_format, out.requires_grad, out.pin_memory, out.sizes) =
        *properties;
  }
  for (const auto& [offsets, sizes, file, offset, nbytes, plain, transforms] : boxes) {
    out.boxes.push_back({offsets, sizes, file, offset, nbytes, plain, transforms});
  }
  return out;
}

PyEntry from_entry(const IndexedEntry& entry) {
  std::optional<PyProperties> properties;
  if (entry.is_tensor) {
    properties = PyProperties(entry.dtype, entry.memory_format, entry.requires_grad,
                              entry.pin_memory, entry.sizes);
  }
  std::vector<PyBox> boxes;
  boxes.reserve(entry.boxes.size());
  for (const IndexedBox& box : entry.boxes) {
    boxes.emplace_back(box.offsets, box.sizes, box.file, box.offset, box.nbytes, box.plain,
                       box.transforms);
  }
  return {entry.fqn, std::move(properties), std::move(boxes)};
}

py::bytes make_index(const std::string& save_id, const py::bytes& metadata,
                     const std::vector<PyFile>& files, const std::string& version,
                     const std::optional<std::vector<PyEntry>>& entries,
                     const std::optional<std::vector<PyPath>>& paths) {
  Index index;
  index.save_id = save_id;
  index.metadata = Seal::of(as_bytes(static_cast<std::string_view>(metadata)));
  for (const PyFile& file : files) index.files.push_back(to_file(file));
  index.has_entries = entries.has_value();
  if (entries) {
    index.version = version;
    for (const PyEntry& entry : *entries) index.entries.push_back(to_entry(entry));
  }
  index.has_paths = paths.has_value();
  if (paths) {
    for (const auto& [fqn, keys] : *paths) index.paths.push_back({fqn, keys});
  }
  const std::vector<std::byte> bytes =
      value_or_raise(without_gil([&] { return write_index(index); }));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::pair<std::string, int64_t>> files(const Index& index) {
  std::vector<std::pair<std::string, int64_t>> out;
  for (const IndexedFile& file : index.files) out.emplace_back(file.name, file.sums.file_nbytes);
  return out;
}

std::optional<std::vector<PyEntry>> entries(const Index& index) {
  if (!index.has_entries) return std::nullopt;
  std::vector<PyEntry> out;
  out.reserve(index.entries.size());
  for (const IndexedEntry& entry : index.entries) out.push_back(from_entry(entry));
  return out;
}

std::optional<std::vector<PyPath>> paths(const Index& index) {
  if (!index.has_paths) return std::nullopt;
  std::vector<PyPath> out;
  out.reserve(index.paths.size());
  for (const IndexedPath& path : index.paths) out.emplace_back(path.fqn, path.keys);
  return out;
}

// Metadata's bytes, the index that belongs to them or None; else one of the usual name that does
// not, or None, whether that is of a newer version, and why it cannot be read.
py::tuple open_one(FileSystem& fs, const std::string& directory, const std::string& metadata_name,
                   const std::string& index_name) {
  const OpenedCheckpoint opened = value_or_raise(without_gil([&] {
    return open_checkpoint(fs, directory, {metadata_name, index_name});
  }));
  const auto shared = [](const std::shared_ptr<const Index>& index) {
    return std::const_pointer_cast<Index>(index);  // Nothing bound here changes it.
  };
  return py::make_tuple(
      py::bytes(reinterpret_cast<const char*>(opened.metadata.data()), opened.metadata.size()),
      shared(opened.index), shared(opened.other_index),
      opened.index_status.code() == StatusCode::kUnsupported,
      to_text(opened.index_status.message()));
}

}  // namespace

py::bytes to_bytes(const BlockSums& sums) {
  return {reinterpret_cast<const char*>(sums.sums.data()), sums.sums.size() * sizeof(uint64_t)};
}

void bind_index(py::module_& module) {
  py::class_<Index, std::shared_ptr<Index>>(module, "Index")
      .def_readonly("save_id", &Index::save_id)
      .def_readonly("version", &Index::version)
      .def_readonly("has_entries", &Index::has_entries)
      .def_property_readonly("files", &files)
      .def_property_readonly("entries", &entries)
      .def_property_readonly("paths", &paths);
  module.def("make_index", &make_index, py::arg("save_id"), py::arg("metadata"), py::arg("files"),
             py::arg("version"), py::arg("entries"), py::arg("paths"));
  module.def("open_checkpoint", &open_one, py::arg("fs"), py::arg("directory"),
             py::arg("metadata_name"), py::arg("index_name"));
}

}  // namespace torch_ckpt
