#include "io/object_store.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/jobs.h"
#include "bindings/plan.h"
#include "io/store_file_system.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Returns the status of an exception of a client, whose message states the failure. Throws if the
// exception's own code raises, for example in `__str__`. Requires: the GIL.
Status described(py::error_already_set& error) {
  retain_interrupt(error);
  const py::module_ errors = py::module_::import("torch_ckpt.errors");
  const py::object& value = error.value();
  const std::string text = py::str(value);
  const auto is = [&](const char* name) { return py::isinstance(value, errors.attr(name)); };
  const auto number = [&] {
    const py::object found = py::getattr(value, "errno", py::none());
    return PyLong_Check(found.ptr()) != 0 ? found.cast<int>() : 0;
  };
  if (is("NotFoundError")) return Status(StatusCode::kNotFound, text, ENOENT);
  if (is("StorageError")) return Status(StatusCode::kStorage, text, number());
  if (is("CorruptionError")) return corruption(text);
  if (is("UnsupportedError")) return unsupported(text);
  if (is("CancelledError")) return cancelled(text);
  const std::string type = py::str(py::type::of(value).attr("__name__"));
  return Status(StatusCode::kStorage,
                str_cat("the client of the store failed: ", type, ": ", text));
}

// As `described`, but does not throw: this thread may be native. Requires: the GIL.
Status status_of(py::error_already_set& error) {
  try {
    return described(error);
  } catch (const std::exception& raised) {
    auto* other = dynamic_cast<const py::error_already_set*>(&raised);
    if (other != nullptr) retain_interrupt(*other);
    return Status(StatusCode::kStorage,
                  str_cat("the client of the store failed: ", Py_TYPE(error.value().ptr())->tp_name,
                          ", whose message cannot be read"));
  }
}

// Calls a client with the GIL. Its exceptions become the status.
template <typename Work>
auto with_client(Work&& work) -> decltype(work()) {
  const py::gil_scoped_acquire locked;
  try {
    return std::forward<Work>(work)();
  } catch (py::error_already_set& error) {
    return status_of(error);
  } catch (const std::exception& error) {
    return internal_error("the client of a store returned something else: ", error.what());
  }
}

// The windows of an upload, as an iterator of Python.
class PyWindows {
 public:
  explicit PyWindows(Windows& windows) : windows_(&windows) {}

  Window next() {
    if (windows_ == nullptr) throw py::stop_iteration();
    std::optional<Window> window = value_or_raise(without_gil([this] { return windows_->next(); }));
    if (!window) throw py::stop_iteration();
    return *std::move(window);
  }

  // The upload has ended, and the iterator may live on.
  void end() { windows_ = nullptr; }

 private:
  Windows* windows_;
};

// A client that is a Python object: `torch_ckpt.filesystems.object_store.ObjectStore`.
class PyObjectStore final : public ObjectStore {
 public:
  explicit PyObjectStore(py::object client) : client_(std::move(client)) {}
  ~PyObjectStore() override {
    const py::gil_scoped_acquire locked;
    client_ = py::object();
  }

  Result<Found> find(const std::string& path, int64_t start_nbytes) override {
    return with_client([&]() -> Result<Found> {
      const py::tuple found = client_.attr("find")(path, start_nbytes);
      Found out = {
          found[0].cast<int64_t>(), found[1].cast<std::string>(), found[2].cast<double>(), {}};
      const py::buffer_info info = found[3].cast<py::buffer>().request();
      const Bytes start = bytes_of(info);
      out.start.assign(start.begin(), start.end());
      return out;
    });
  }

  Result<Window> get(const std::string& path, int64_t offset, int64_t nbytes) override {
    return with_client([&]() -> Result<Window> {
      const py::buffer got = client_.attr("get")(path, offset, nbytes);
      const auto release = [](py::buffer_info* info) {
        const py::gil_scoped_acquire locked;
        delete info;
      };
      // The information about a buffer references it.
      const std::shared_ptr<py::buffer_info> info(new py::buffer_info(got.request()), release);
      const Bytes bytes = bytes_of(*info);
      if (ssize(bytes) != nbytes) {
        return corruption("cannot read ", nbytes, " bytes at ", offset, " of ", path,
                          ": the store returned ", bytes.size(), " bytes");
      }
      return Window{bytes, info};
    });
  }

  Status put(const std::string& path, Bytes bytes, const Condition& condition) override {
    return with_client([&]() -> Status {
      const py::memoryview memory = py::memoryview::from_memory(
          bytes.empty() ? "" : static_cast<const void*>(bytes.data()), std::ssize(bytes));
      py::object version = py::none();
      if (condition.kind == Condition::Kind::kAbsent) version = py::str("");
      if (condition.kind == Condition::Kind::kVersion) version = py::str(condition.version);
      client_.attr("put")(path, memory, version);
      return ok_status();
    });
  }

  Status put_stream(const std::string& path, int64_t part_nbytes, Windows& windows) override {
    return with_client([&]() -> Status {
      const py::object iterator =
          py::cast(new PyWindows(windows), py::return_value_policy::take_ownership);
      try {
        client_.attr("put_stream")(path, part_nbytes, iterator);
      } catch (...) {
        iterator.cast<PyWindows&>().end();
        throw;
      }
      iterator.cast<PyWindows&>().end();
      return ok_status();
    });
  }

  Result<std::vector<std::string>> list(const std::string& path) override {
    return with_client([&]() -> Result<std::vector<std::string>> {
      return client_.attr("list")(path).cast<std::vector<std::string>>();
    });
  }

  bool copies() const override {
    const Result<bool> found = with_client([&]() -> Result<bool> {
      return static_cast<bool>(py::bool_(py::getattr(client_, "copies", py::bool_(false))));
    });
    return found.ok() && *found;
  }

  Status copy(const std::string& from, const std::string& to) override {
    return with_client([&]() -> Status {
      client_.attr("copy")(from, to);
      return ok_status();
    });
  }

  Status remove(const std::string& path) override {
    return with_client([&]() -> Status {
      client_.attr("remove")(path);
      return ok_status();
    });
  }

  Status remove_all(const std::string& path) override {
    return with_client([&]() -> Status {
      client_.attr("remove_all")(path);
      return ok_status();
    });
  }

 private:
  py::object client_;
};

}  // namespace

void bind_object_store(py::module_& module) {
  py::class_<Window>(module, "Window", py::buffer_protocol()).def_buffer([](const Window& window) {
    // A client only reads it.
    auto* data = reinterpret_cast<uint8_t*>(const_cast<std::byte*>(window.bytes.data()));
    return py::buffer_info(data, std::ssize(window.bytes), /*readonly=*/true);
  });
  py::class_<PyWindows>(module, "Windows")
      .def("__iter__", [](py::object windows) { return windows; })
      .def("__next__", &PyWindows::next);
  py::class_<StoreFileSystem, FileSystem>(module, "StoreFileSystem")
      .def(py::init([](py::object client) {
             return std::make_unique<StoreFileSystem>(
                 std::make_unique<PyObjectStore>(std::move(client)));
           }),
           py::arg("client"));
}

}  // namespace torch_ckpt
