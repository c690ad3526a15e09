#include "io/file_system.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <utility>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/path_argument.h"
#include "engine/commit.h"
#include "engine/load/archive_records.h"
#include "io/posix_file_system.h"
#include "io/storage_call.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

FileSystem& local_file_system() {
  static PosixFileSystem file_system;
  return file_system;
}

// A StorageCall of Python, as a context manager.
struct PyStorageCall {
  const std::string doing;
  const std::string path;
  std::optional<StorageCall> call = std::nullopt;
};

thread_local std::chrono::nanoseconds waited_at_storage{0};

// Runs `work` with the GIL released, and counts how long it took.
template <typename Work>
auto at_storage(Work&& work) {
  struct Timer {
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    ~Timer() { waited_at_storage += std::chrono::steady_clock::now() - begin; }
  } timer;
  return without_gil(std::forward<Work>(work));
}

// How to open a file for a small read. A store sends the first bytes of a buffered file with its
// length.
Caching caching_for(const FileSystem& fs, int64_t offset, int64_t nbytes) {
  const bool reads_first = offset == 0 && nbytes > 0;
  return fs.traits().has_folders || reads_first ? Caching::kBuffered : Caching::kDirect;
}

// Returns the length of a file, and its bytes in [offset, offset + nbytes). Returns fewer bytes if
// the file ends earlier. If the file is known to have all of them, a store needs one request less.
std::pair<int64_t, py::bytes> read_range(FileSystem& fs, const std::filesystem::path& path,
                                         int64_t offset, int64_t nbytes, bool exact) {
  if (offset < 0 || nbytes < 0) throw py::value_error("the offset or length of a read is negative");
  std::vector<std::byte> bytes;
  const int64_t file_nbytes = value_or_raise(at_storage([&]() -> Result<int64_t> {
    const Caching caching = caching_for(fs, offset, nbytes);
    ASSIGN_OR_RETURN(const auto file, exact ? fs.open_known(path.string(), offset + nbytes, caching)
                                            : fs.open(path.string(), OpenMode::kRead, caching));
    ASSIGN_OR_RETURN(const int64_t size, file->size());
    bytes.resize(static_cast<size_t>(std::clamp<int64_t>(size - offset, 0, nbytes)));
    if (!bytes.empty()) RETURN_IF_ERROR(file->read(offset, bytes));
    return size;
  }));
  return {file_nbytes, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
}

// Name, offset, length and CRC-32 of a record.
using PyRecord = std::tuple<py::object, int64_t, int64_t, uint32_t>;

// Returns the length and the records of a file that torch.save wrote.
std::pair<int64_t, std::vector<PyRecord>> read_archive_of(FileSystem& fs,
                                                          const std::filesystem::path& path) {
  const Archive archive =
      value_or_raise(at_storage([&] { return read_archive(fs, path.string()); }));
  std::pair<int64_t, std::vector<PyRecord>> out(archive.nbytes, {});
  out.second.reserve(archive.records.size());
  for (const ArchiveRecord& record : archive.records) {
    out.second.emplace_back(to_text(record.name), record.offset, record.nbytes, record.crc);
  }
  return out;
}

// Decodes names as os.listdir does, since they need not be UTF-8.
std::vector<py::str> list_directory(FileSystem& fs, const std::filesystem::path& path) {
  const std::vector<std::string> names =
      value_or_raise(at_storage([&] { return fs.list_directory(path.string()); }));
  std::vector<py::str> out;
  out.reserve(names.size());
  for (const std::string& name : names) {
    PyObject* decoded = PyUnicode_DecodeFSDefaultAndSize(name.data(), std::ssize(name));
    if (decoded == nullptr) throw py::error_already_set();
    out.push_back(py::reinterpret_steal<py::str>(decoded));
  }
  return out;
}

bool exists(FileSystem& fs, const std::filesystem::path& path) {
  const Status opened = without_gil(
      [&] { return fs.open(path.string(), OpenMode::kRead, caching_for(fs, 0, 0)).status(); });
  if (opened.code() == StatusCode::kNotFound) return false;
  raise_if_error(opened);
  return true;
}

void commit_checkpoint(FileSystem& fs, const std::filesystem::path& directory,
                       const std::string& metadata_name, const std::string& index_name,
                       const py::bytes& metadata, const py::bytes& index,
                       const std::string& save_id,
                       const std::optional<std::vector<std::string>>& data_files, bool sync,
                       const std::optional<std::filesystem::path>& rename_to,
                       const std::string& replaced) {
  const Commit what = {.directory = directory.string(),
                       .names = {metadata_name, index_name},
                       .metadata = as_bytes(static_cast<std::string_view>(metadata)),
                       .index = as_bytes(static_cast<std::string_view>(index)),
                       .save_id = save_id,
                       .replaced = replaced,
                       .data_files = data_files ? *data_files : std::span<const std::string>(),
                       .keeps_files = !data_files,
                       .sync = sync};
  raise_if_error(at_storage([&] {
    return rename_to ? commit_directory(fs, what, rename_to->string()) : commit(fs, what);
  }));
}

}  // namespace

void bind_file_system(py::module_& module) {
  py::class_<FileSystem>(module, "FileSystem")
      .def(
          "create_directories",
          [](FileSystem& fs, const std::filesystem::path& path) {
            raise_if_error(at_storage([&] { return fs.create_directories(path.string()); }));
          },
          py::arg("path"))
      .def(
          "sync_directory",
          [](FileSystem& fs, const std::filesystem::path& path) {
            raise_if_error(at_storage([&] { return fs.sync_directory(path.string()); }));
          },
          py::arg("path"))
      .def(
          "remove",
          [](FileSystem& fs, const std::filesystem::path& path) {
            raise_if_error(at_storage([&] { return fs.remove(path.string()); }));
          },
          py::arg("path"))
      .def(
          "remove_all",
          [](FileSystem& fs, const std::filesystem::path& path) {
            raise_if_error(at_storage([&] { return fs.remove_all(path.string()); }));
          },
          py::arg("path"))
      .def(
          "modified_s",
          [](FileSystem& fs, const std::filesystem::path& path) {
            return value_or_raise(at_storage([&] { return fs.modified_s(path.string()); }));
          },
          py::arg("path"))
      .def(
          "rename",
          [](FileSystem& fs, const std::filesystem::path& from, const std::filesystem::path& to) {
            raise_if_error(at_storage([&] { return fs.rename(from.string(), to.string()); }));
          },
          py::arg("from_path"), py::arg("to_path"))
      .def(
          "link",
          [](FileSystem& fs, const std::filesystem::path& from, const std::filesystem::path& to,
             bool sync) {
            raise_if_error(at_storage([&] { return fs.link(from.string(), to.string(), sync); }));
          },
          py::arg("from_path"), py::arg("to_path"), py::arg("sync"))
      .def(
          "exchange",
          [](FileSystem& fs, const std::filesystem::path& one, const std::filesystem::path& other) {
            raise_if_error(at_storage([&] { return fs.exchange(one.string(), other.string()); }));
          },
          py::arg("one"), py::arg("other"))
      .def(
          "renames_directories",
          [](FileSystem& fs, const std::filesystem::path& parent) {
            return at_storage([&] { return fs.renames_directories(parent.string()); });
          },
          py::arg("parent"))
      .def(
          "write_file",
          [](FileSystem& fs, const std::filesystem::path& path, const py::bytes& contents,
             bool sync, bool update) {
            const Bytes bytes = as_bytes(static_cast<std::string_view>(contents));
            const OpenMode mode = update ? OpenMode::kUpdate : OpenMode::kCreate;
            raise_if_error(
                at_storage([&] { return write_file(fs, path.string(), bytes, sync, mode); }));
          },
          py::arg("path"), py::arg("contents"), py::arg("sync"), py::arg("update") = false)
      .def("list_directory", &list_directory, py::arg("path"))
      .def("exists", &exists, py::arg("path"))
      .def("read_range", &read_range, py::arg("path"), py::arg("offset"), py::arg("nbytes"),
           py::arg("exact") = false)
      .def("read_archive", &read_archive_of, py::arg("path"))
      .def("commit", &commit_checkpoint, py::arg("directory"), py::arg("metadata_name"),
           py::arg("index_name"), py::arg("metadata"), py::arg("index"), py::arg("save_id"),
           py::arg("data_files"), py::arg("sync"), py::arg("rename_to") = py::none(),
           py::arg("replaced") = "")
      .def(
          "version",
          [](FileSystem& fs, const std::filesystem::path& path) {
            return value_or_raise(at_storage([&] { return fs.version(path.string()); }));
          },
          py::arg("path"))
      .def(
          "publish",
          [](FileSystem& fs, const std::filesystem::path& path, const py::bytes& contents,
             const std::string& version) {
            const Bytes bytes = as_bytes(static_cast<std::string_view>(contents));
            raise_if_error(at_storage([&] { return fs.publish(path.string(), bytes, version); }));
          },
          py::arg("path"), py::arg("contents"), py::arg("version"))
      .def_property_readonly(
          "publishes_by_condition",
          [](const FileSystem& fs) { return fs.traits().publishes_by_condition; })
      .def_property_readonly("writes_at_offsets",
                             [](const FileSystem& fs) { return fs.traits().writes_at_offsets; })
      .def_property_readonly("request_nbytes",
                             [](const FileSystem& fs) { return fs.traits().request_nbytes; })
      .def_property_readonly("has_folders",
                             [](const FileSystem& fs) { return fs.traits().has_folders; });
  module.def(
      "copy_file",
      [](FileSystem& from, const std::filesystem::path& source, FileSystem& to,
         const std::filesystem::path& target) {
        raise_if_error(
            at_storage([&] { return copy_file(from, source.string(), to, target.string()); }));
      },
      py::arg("from_file_system"), py::arg("source"), py::arg("to_file_system"), py::arg("target"));
  module.def("waited_at_storage_s",
             [] { return std::chrono::duration<double>(waited_at_storage).count(); });
  py::class_<PyStorageCall>(module, "StorageCall")
      .def(py::init([](std::string doing, const std::filesystem::path& path) {
             return std::unique_ptr<PyStorageCall>(
                 new PyStorageCall{std::move(doing), path.string()});
           }),
           py::arg("doing"), py::arg("path"))
      .def("__enter__",
           [](PyStorageCall& made) { made.call.emplace(made.doing.c_str(), made.path); })
      .def("__exit__", [](PyStorageCall& made, const py::args&) { made.call.reset(); });
  module.def(
      "long_storage_calls",
      [](double longer_than_s) {
        std::vector<
            std::tuple<uint64_t, uint64_t, double, std::string, py::bytes, int64_t, int64_t>>
            out;
        for (LongCall& call : StorageCall::longer_than(longer_than_s)) {
          out.emplace_back(call.key, call.number, call.waited_s, std::move(call.doing),
                           py::bytes(call.path), call.done_nbytes, call.total_nbytes);
        }
        return out;
      },
      py::arg("longer_than_s"));
  module.def("await_storage_call", [] { without_gil([] { StorageCall::wait_for_any(); }); });
  module.def("local_file_system", &local_file_system, py::return_value_policy::reference);
}

}  // namespace torch_ckpt
