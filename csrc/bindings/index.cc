#include "format/index_file.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <unordered_map>
#include <unordered_set>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"
#include "bindings/plan.h"
#include "engine/open_checkpoint.h"
#include "engine/save/planned_index.h"
#include "engine/save/reuse.h"
#include "format/commit_files.h"
#include "format/stored_index.h"
#include "plan/paths.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Name, length, block sums as encoded by to_bytes(), SliceDigests, and the save that wrote the file
// (index_records::Origin).
using PyFile = std::tuple<std::string, int64_t, py::bytes, py::bytes, uint64_t>;

// Offsets, sizes, file, offset, length, plain, transforms.
using PyStoredBox =
    std::tuple<Dims, Dims, int64_t, int64_t, int64_t, bool, std::vector<std::string>>;

// Dtype, memory format, requires_grad, pin_memory, sizes.
using PyProperties = std::tuple<std::string, std::string, bool, bool, Dims>;

// FQN, properties of a tensor (None for an object), boxes.
using PyEntry = std::tuple<std::string, std::optional<PyProperties>, std::vector<PyStoredBox>>;

using PyPath = std::pair<std::string, std::vector<std::variant<std::string, int64_t>>>;

// checkpoint_id, whether it is a path, save_id, load_id, modules.
using PyStorageMeta = std::tuple<std::optional<std::string>, bool, std::optional<std::string>,
                                 std::optional<std::string>, std::vector<std::string>>;

py::bytes to_python(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

IndexedFile to_file(const PyFile& from) {
  const auto& [name, nbytes, sums, digests, origin] = from;
  IndexedFile out = {name, {}, origin};
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
  std::vector<PyStoredBox> boxes;
  boxes.reserve(entry.boxes.size());
  for (const IndexedBox& box : entry.boxes) {
    boxes.emplace_back(box.offsets, box.sizes, box.file, box.offset, box.nbytes, box.plain,
                       box.transforms);
  }
  return {entry.fqn, std::move(properties), std::move(boxes)};
}

// Returns what the ranks report of the digests in their files.
std::vector<Bytes> digests_of(const std::vector<PyFile>& files) {
  std::vector<Bytes> out;
  for (const PyFile& file : files) out.push_back(view_of(std::get<3>(file)));
  return out;
}

// Returns an index without the digest of its metadata.
Index to_index(const std::string& save_id, const std::vector<PyFile>& files,
               const std::string& version, const std::optional<std::vector<PyEntry>>& entries,
               const std::optional<std::vector<PyPath>>& paths) {
  Index index;
  index.save_id = save_id;
  for (const PyFile& file : files) index.files.push_back(to_file(file));
  index.has_entries = entries.has_value();
  if (entries) {
    index.version = version;
    index.entries.reserve(entries->size());
    for (const PyEntry& entry : *entries) index.entries.push_back(to_entry(entry));
  }
  index.has_paths = paths.has_value();
  if (paths) {
    for (const auto& [fqn, keys] : *paths) index.paths.push_back({fqn, keys});
  }
  return index;
}

// Returns the trailer of metadata that Python pickled, and the index that belongs to it.
std::pair<py::bytes, py::bytes> make_index(const std::string& save_id, const py::bytes& metadata,
                                           const std::vector<PyFile>& files,
                                           const std::string& version,
                                           const std::optional<std::vector<PyEntry>>& entries,
                                           const std::optional<std::vector<PyPath>>& paths,
                                           const std::string& stored_save_id) {
  Index index = to_index(save_id, files, version, entries, paths);
  index.stored_save_id = stored_save_id;
  raise_if_error(add_digests(index, digests_of(files)));
  index.metadata = FileDigest::of(as_bytes(static_cast<std::string_view>(metadata)));
  const auto trailer = value_or_raise(write_metadata_trailer({save_id, index.metadata}));
  const std::vector<std::byte> bytes =
      value_or_raise(without_gil([&] { return write_index(index); }));
  return {to_python(trailer), to_python(bytes)};
}

StorageMeta to_storage_meta(const PyStorageMeta& from) {
  StorageMeta out;
  std::tie(out.checkpoint_id, out.checkpoint_is_path, out.save_id, out.load_id, out.modules) = from;
  return out;
}

// Returns the contents of `.metadata` and of its index.
std::pair<py::bytes, py::bytes> commit_files(const std::string& save_id,
                                             const std::vector<PyFile>& files,
                                             const std::string& version,
                                             const std::vector<PyEntry>& entries,
                                             const std::optional<std::vector<PyPath>>& paths,
                                             const PyStorageMeta& storage_meta) {
  Index index = to_index(save_id, files, version, entries, paths);
  raise_if_error(add_digests(index, digests_of(files)));
  const StorageMeta storage = to_storage_meta(storage_meta);
  const CommitFiles made =
      value_or_raise(without_gil([&] { return encode_commit_files(std::move(index), storage); }));
  return {to_python(made.metadata), to_python(made.index)};
}

// Merges the paths of all ranks. If several ranks have an FQN, the path of the first one remains.
Result<std::vector<IndexedPath>> merged(const std::vector<Bytes>& encoded) {
  std::vector<IndexedPath> out;
  std::unordered_set<std::string> seen;
  for (const Bytes bytes : encoded) {
    ASSIGN_OR_RETURN(std::vector<StatePath> paths, decode_paths(bytes));
    if (encoded.size() == 1) return paths;
    for (StatePath& path : paths) {
      if (seen.insert(path.fqn).second) out.push_back(std::move(path));
    }
  }
  return out;
}

// Rank, file, encoded extents of the rank's items in the file.
using PyRankFile = std::tuple<int64_t, PyFile, py::bytes>;

// Returns the contents of `.metadata` and of its index, for a save with a GlobalPlan.
std::pair<py::bytes, py::bytes> planned_commit_files(
    const GlobalPlan& plan, const std::string& save_id, const std::vector<PyRankFile>& files,
    const std::string& version, const std::optional<std::vector<py::bytes>>& paths,
    const PyStorageMeta& storage_meta) {
  std::vector<RankFile> from;
  from.reserve(files.size());
  for (const auto& [rank, file, extents] : files) {
    from.push_back({rank, to_file(file), view_of(extents), view_of(std::get<3>(file))});
  }
  std::vector<Bytes> encoded;
  if (paths) {
    for (const py::bytes& some : *paths) encoded.push_back(view_of(some));
  }
  const StorageMeta storage = to_storage_meta(storage_meta);
  const CommitFiles made = value_or_raise(without_gil([&]() -> Result<CommitFiles> {
    ASSIGN_OR_RETURN(Index index, planned_index(plan.stored(), std::move(from)));
    index.save_id = save_id;
    index.version = version;
    index.has_paths = paths.has_value();
    ASSIGN_OR_RETURN(index.paths, merged(encoded));
    return encode_commit_files(std::move(index), storage);
  }));
  return {to_python(made.metadata), to_python(made.index)};
}

// Strides, offset of the first element, CRC-32 of the extent.
using PyView = std::tuple<Dims, int64_t, uint32_t>;

// An index in memory, and the bytes that it refers to.
struct IndexInMemory {
  std::vector<std::byte> bytes;
  std::shared_ptr<const StoredIndex> index;
};

std::shared_ptr<StoredIndex> open_in_memory(std::vector<std::byte> bytes) {
  const auto owner = std::make_shared<IndexInMemory>();
  owner->bytes = std::move(bytes);
  owner->index = value_or_raise(without_gil([&] { return StoredIndex::in_memory(owner->bytes); }));
  return {owner, std::const_pointer_cast<StoredIndex>(owner->index).get()};
}

std::shared_ptr<StoredIndex> index_of(const py::bytes& bytes) {
  const Bytes view = view_of(bytes);
  return open_in_memory({view.begin(), view.end()});
}

// Returns an index of files in another format. The keys of `views` are entry numbers.
std::shared_ptr<StoredIndex> foreign_index(
    const std::string& save_id, const std::vector<std::pair<std::string, int64_t>>& files,
    const std::vector<PyEntry>& entries, const std::unordered_map<size_t, PyView>& views,
    const std::vector<PyPath>& paths) {
  Index index = to_index(save_id, {}, "", entries, paths);
  index.is_foreign = true;
  for (const auto& [name, nbytes] : files) {
    IndexedFile& file = index.files.emplace_back();
    file.name = name;
    file.sums.file_nbytes = nbytes;
  }
  for (const auto& [entry, view] : views) {
    const auto& [strides, offset, crc] = view;
    if (entry >= index.entries.size()) throw py::index_error("a view has no entry");
    index.entries[entry].view = IndexedView{strides, offset, crc};
  }
  return open_in_memory(value_or_raise(without_gil([&] { return write_index(index); })));
}

// Encodes a Python str as UTF-8. Returns nullopt for a str with lone surrogates.
std::optional<std::string> to_utf8(const py::str& text) {
  py::ssize_t nbytes = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes);
  if (data != nullptr) return std::string(data, static_cast<size_t>(nbytes));
  PyErr_Clear();
  return std::nullopt;
}

Result<PyEntry> read_entry(const StoredIndex& index, int64_t number) {
  ASSIGN_OR_RETURN(StoredEntry entry, index.entry(number));
  ASSIGN_OR_RETURN(entry.facts.boxes, index.boxes(entry, 0, entry.box_count));
  return from_entry(entry.facts);
}

std::vector<std::pair<std::string, int64_t>> files(const StoredIndex& index) {
  return value_or_raise(without_gil([&]() -> Result<std::vector<std::pair<std::string, int64_t>>> {
    std::vector<std::pair<std::string, int64_t>> out;
    for (int64_t i = 0; i < index.file_count(); ++i) {
      ASSIGN_OR_RETURN(StoredFile file, index.file(i));
      out.emplace_back(std::move(file.name), file.nbytes);
    }
    return out;
  }));
}

// Returns name, length and block sums of a file, and the save that wrote it, which may be this one.
std::tuple<std::string, int64_t, py::bytes, uint64_t> file_at(const StoredIndex& index,
                                                              int64_t number) {
  if (number < 0 || number >= index.file_count()) throw py::index_error("no such file");
  StoredFile file;
  BlockSums sums;
  index_records::Origin origin = 0;
  raise_if_error(without_gil([&]() -> Status {
    ASSIGN_OR_RETURN(file, index.file(number));
    ASSIGN_OR_RETURN(origin, index.origin(number));
    const int64_t blocks = BlockGrid::block_count(file.nbytes, index.block_nbytes());
    ASSIGN_OR_RETURN(sums.sums, index.sums(file, 0, blocks));
    return ok_status();
  }));
  if (origin == 0) origin = std::strtoull(index.save_id().c_str(), nullptr, 16);
  return {file.name, file.nbytes, to_bytes(sums), origin};
}

uint64_t origin(const StoredIndex& index, int64_t number) {
  if (number < 0 || number >= index.file_count()) throw py::index_error("no such file");
  return value_or_raise(without_gil([&] { return index.origin(number); }));
}

// Position of the item, file, offset and length of the box, its sample, both halves of its digest.
using PyBaseBox = std::tuple<int64_t, int64_t, int64_t, int64_t, uint64_t, uint64_t, uint64_t>;

std::pair<std::vector<PyBaseBox>, std::vector<int64_t>> boxes_for(
    const StoredIndex& index, const Work& work, const py::bytes& samples,
    const std::vector<std::optional<BoxName>>& names) {
  const Bytes raw = view_of(samples);
  std::vector<uint64_t> values(raw.size() / sizeof(uint64_t));
  if (!raw.empty()) std::memcpy(values.data(), raw.data(), raw.size());
  if (std::ssize(values) != work.size() || (!names.empty() && std::ssize(names) != work.size())) {
    throw py::value_error("items lack a sample or a name");
  }
  BaseBoxes found =
      value_or_raise(without_gil([&] { return find_in_base(index, work, values, names); }));
  std::vector<PyBaseBox> equal;
  equal.reserve(found.equal.size());
  for (const BaseBox& box : found.equal) {
    equal.emplace_back(box.position, box.place.file, box.place.offset, box.place.nbytes,
                       box.digest.sample, box.digest.low, box.digest.high);
  }
  return {std::move(equal), std::move(found.changed)};
}

std::string file_name(const StoredIndex& index, int64_t number) {
  if (number < 0 || number >= index.file_count()) throw py::index_error("no such file");
  return value_or_raise(without_gil([&] { return index.file(number); })).name;
}

PyEntry entry_at(const StoredIndex& index, int64_t number) {
  if (number < 0 || number >= index.entry_count()) throw py::index_error("no such entry");
  return value_or_raise(without_gil([&] { return read_entry(index, number); }));
}

// Returns the view of an entry on its extent, as `foreign_index` got it.
std::optional<PyView> view_at(const StoredIndex& index, int64_t number) {
  if (number < 0 || number >= index.entry_count()) throw py::index_error("no such entry");
  const StoredEntry entry = value_or_raise(without_gil([&] { return index.entry(number); }));
  if (!entry.facts.view) return std::nullopt;
  return PyView{entry.facts.view->strides, entry.facts.view->storage_offset, entry.facts.view->crc};
}

std::optional<int64_t> number_of(const StoredIndex& index, const py::str& fqn) {
  const std::optional<std::string> name = to_utf8(fqn);
  if (!name) return std::nullopt;
  return value_or_raise(without_gil([&] { return index.find_entry(*name); }));
}

std::optional<PyEntry> find(const StoredIndex& index, const py::str& fqn) {
  const std::optional<int64_t> number = number_of(index, fqn);
  if (!number) return std::nullopt;
  return entry_at(index, *number);
}

// Returns the number and the box with these offsets. An object's box has no offsets.
std::optional<std::pair<int64_t, PyStoredBox>> find_box(const StoredIndex& index,
                                                        const py::str& fqn,
                                                        const std::optional<Dims>& offsets,
                                                        std::optional<int64_t> guess) {
  const std::optional<int64_t> number = number_of(index, fqn);
  if (!number) return std::nullopt;
  using Found = std::optional<std::pair<int64_t, PyStoredBox>>;
  return value_or_raise(without_gil([&]() -> Result<Found> {
    ASSIGN_OR_RETURN(StoredEntry entry, index.entry(*number));
    if (entry.facts.is_tensor != offsets.has_value()) return Found();
    ASSIGN_OR_RETURN(const auto box, index.find_box(entry, offsets.value_or(Dims()), guess));
    if (!box) return Found();
    ASSIGN_OR_RETURN(entry.facts.boxes, index.boxes(entry, *box, *box + 1));
    return Found({*box, std::move(std::get<2>(from_entry(entry.facts)).front())});
  }));
}

std::vector<std::string> fqns(const StoredIndex& index) {
  return value_or_raise(without_gil([&] { return index.fqns(); }));
}

std::optional<std::vector<PyPath>> paths(const StoredIndex& index) {
  if (!index.has_paths()) return std::nullopt;
  std::vector<PyPath> out;
  for (IndexedPath& path : value_or_raise(without_gil([&] { return index.paths(); }))) {
    out.emplace_back(std::move(path.fqn), std::move(path.keys));
  }
  return out;
}

std::vector<std::pair<int64_t, int64_t>> damage(const StoredIndex& index) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const Region& region : value_or_raise(without_gil([&] { return index.damage(); }))) {
    out.emplace_back(region.offset, region.offset + region.nbytes);
  }
  return out;
}

py::bytes read_pickle(const MetadataFile& metadata, bool verify) {
  return to_python(value_or_raise(without_gil([&] { return metadata.read_pickle(verify); })));
}

// Returns the contents of `.metadata` with another term in the trailer.
py::bytes with_term(const py::bytes& metadata, uint64_t term) {
  std::string contents(metadata);
  const size_t begin = contents.size() - std::min<size_t>(contents.size(), kMetadataTrailerNbytes);
  const Bytes last = as_bytes(std::string_view(contents).substr(begin));
  MetadataTrailer trailer = value_or_raise(parse_metadata_trailer(last, ssize(contents)));
  trailer.term = term;
  const auto written = value_or_raise(write_metadata_trailer(trailer));
  std::memcpy(contents.data() + begin, written.data(), written.size());
  return contents;
}

// Returns five values: the metadata; the index that belongs to it, or None; otherwise names of
// data files that other indexes have; whether index or trailer has a newer version; why there is no
// index that belongs to it.
py::tuple open_one(FileSystem& fs, const std::filesystem::path& directory,
                   const std::string& metadata_name, const std::string& index_name) {
  const OpenedCheckpoint opened = value_or_raise(without_gil([&] {
    return open_checkpoint(fs, directory.string(), {metadata_name, index_name});
  }));
  const auto shared = [](const std::shared_ptr<const StoredIndex>& index) {
    return std::const_pointer_cast<StoredIndex>(index);  // All bound functions are const.
  };
  const bool newer = opened.index_status.code() == StatusCode::kUnsupported ||
                     opened.metadata->trailer_status().code() == StatusCode::kUnsupported;
  py::list indexed_files;
  for (const std::string& name : opened.indexed_files) indexed_files.append(py::bytes(name));
  return py::make_tuple(std::const_pointer_cast<MetadataFile>(opened.metadata),
                        shared(opened.index), indexed_files, newer,
                        to_text(opened.index_status.message()));
}

}  // namespace

py::bytes to_bytes(const BlockSums& sums) {
  return {reinterpret_cast<const char*>(sums.sums.data()), sums.sums.size() * sizeof(uint64_t)};
}

void bind_index(py::module_& module) {
  // Both classes read files of the FileSystem singleton, which outlives them.
  py::class_<MetadataFile, std::shared_ptr<MetadataFile>>(module, "MetadataFile")
      .def(py::init([](FileSystem& fs, const std::filesystem::path& path) {
             return value_or_raise(
                 without_gil([&] { return MetadataFile::open(fs, path.string()); }));
           }),
           py::arg("fs"), py::arg("path"))
      .def_property_readonly("has_trailer",
                             [](const MetadataFile& m) { return m.trailer().has_value(); })
      .def_property_readonly(
          "trailer_problem",
          [](const MetadataFile& m) { return to_text(m.trailer_status().message()); })
      .def_property_readonly(
          "term", [](const MetadataFile& m) { return m.trailer() ? m.trailer()->term : 0; })
      .def("read_pickle", &read_pickle, py::arg("verify") = true)
      .def("check", [](const MetadataFile& m) {
        raise_if_error(without_gil([&] { return m.check_pickle(); }));
      });
  py::class_<StoredIndex, std::shared_ptr<StoredIndex>>(module, "Index")
      .def_property_readonly("save_id", [](const StoredIndex& i) { return to_text(i.save_id()); })
      .def_property_readonly(
          "stored_save_id",
          [](const StoredIndex& i) { return to_text(value_or_raise(i.stored_save_id())); })
      .def_property_readonly("version",
                             [](const StoredIndex& i) { return value_or_raise(i.version()); })
      .def_property_readonly("writer_revision", &StoredIndex::writer_revision)
      .def_property_readonly("has_entries", &StoredIndex::has_entries)
      .def_property_readonly("has_paths", &StoredIndex::has_paths)
      .def_property_readonly("box_count", &StoredIndex::box_count)
      .def_property_readonly("files", &files)
      .def("file_name", &file_name, py::arg("number"))
      .def("file", &file_at, py::arg("number"))
      .def("origin", &origin, py::arg("number"))
      .def("find_in_base", &boxes_for, py::arg("work"), py::arg("samples"), py::arg("names"))
      .def("__len__", &StoredIndex::entry_count)
      .def("__getitem__", &entry_at, py::arg("number"))
      .def("__iter__",
           [](const py::object& index) {
             PyObject* iterator = PySeqIter_New(index.ptr());
             if (iterator == nullptr) throw py::error_already_set();
             return py::reinterpret_steal<py::object>(iterator);
           })
      .def(
          "__contains__",
          [](const StoredIndex& i, const py::str& fqn) { return number_of(i, fqn).has_value(); },
          py::arg("fqn"))
      .def("find", &find, py::arg("fqn"))
      .def("view", &view_at, py::arg("number"))
      .def("find_box", &find_box, py::arg("fqn"), py::arg("offsets"), py::arg("guess"))
      .def("fqns", &fqns)
      .def_property_readonly("paths", &paths)
      .def("damage", &damage)
      .def_property_readonly("in_memory", [](const StoredIndex& i) { return !i.memory().empty(); })
      .def("__reduce__",
           [](const StoredIndex& i) {
             if (i.memory().empty()) throw py::type_error("an index of a file is not pickled");
             const py::object make =
                 py::module_::import("torch_ckpt._core._native").attr("index_of");
             return py::make_tuple(make, py::make_tuple(to_python(i.memory())));
           })
      .def("check",
           [](const StoredIndex& i) { raise_if_error(without_gil([&] { return i.check(); })); });
  module.def("make_index", &make_index, py::arg("save_id"), py::arg("metadata"), py::arg("files"),
             py::arg("version"), py::arg("entries"), py::arg("paths"),
             py::arg("stored_save_id") = "");
  module.def("commit_files", &commit_files, py::arg("save_id"), py::arg("files"),
             py::arg("version"), py::arg("entries"), py::arg("paths"), py::arg("storage_meta"));
  module.def("with_term", &with_term, py::arg("metadata"), py::arg("term"));
  module.def("planned_commit_files", &planned_commit_files, py::arg("plan"), py::arg("save_id"),
             py::arg("files"), py::arg("version"), py::arg("paths"), py::arg("storage_meta"));
  module.def("index_of", &index_of, py::arg("encoded"));
  module.def("foreign_index", &foreign_index, py::arg("save_id"), py::arg("files"),
             py::arg("entries"), py::arg("views"), py::arg("paths"));
  module.def("open_checkpoint", &open_one, py::arg("fs"), py::arg("directory"),
             py::arg("metadata_name"), py::arg("index_name"));
}

}  // namespace torch_ckpt
