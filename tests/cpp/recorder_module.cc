// The Python module `recorder`: records what a save does to a real directory, and rebuilds every
// legal tree after a power cut (power_cut.h), for tests that load them with stock DCP as well.
// It has a disk that hangs, too, a slow one, and one that keeps everything elsewhere. Built by
// CMake where it is told of a Python; never a part of the package.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "io/posix_file_system.h"
#include "support/power_cut.h"
#include "support/recording_file_system.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

using PyTree = std::map<std::string, py::bytes>;  // Path to bytes.

PyTree to_python(const DiskTree& tree) {
  PyTree out;
  for (const auto& [path, bytes] : tree) out.emplace(path, py::bytes(*bytes));
  return out;
}

// Opens no file before somebody has opened a FIFO for writing: a file server that does not answer.
class HangingFileSystem : public PosixFileSystem {
 public:
  explicit HangingFileSystem(std::string fifo) : fifo_(std::move(fifo)) {}

  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override {
    // Metadata are small and in some cache.
    if (path.ends_with(".distcp")) std::ifstream wait(fifo_);
    return PosixFileSystem::open(path, mode, caching);
  }

 private:
  const std::string fifo_;
};

// A disk that takes its time for each request.
class SlowQueue : public IoQueue {
 public:
  SlowQueue(std::unique_ptr<IoQueue> inner, std::chrono::milliseconds pause)
      : inner_(std::move(inner)), pause_(pause) {}

  const QueueMode& mode() const override { return inner_->mode(); }
  int room() const override { return inner_->room(); }
  int in_flight() const override { return inner_->in_flight(); }
  void submit(std::span<const IoRequest> requests) override { inner_->submit(requests); }
  std::span<const IoDone> wait() override {
    const std::span<const IoDone> done = inner_->wait();
    std::this_thread::sleep_for(pause_ * done.size());
    return done;
  }

 private:
  const std::unique_ptr<IoQueue> inner_;
  const std::chrono::milliseconds pause_;
};

class SlowFileSystem : public PosixFileSystem {
 public:
  explicit SlowFileSystem(int64_t pause_ms) : pause_(pause_ms) {}

  std::unique_ptr<IoQueue> make_queue(int depth) override {
    return std::make_unique<SlowQueue>(PosixFileSystem::make_queue(depth), pause_);
  }

 private:
  const std::chrono::milliseconds pause_;
};

// Keeps what it is given under any path in a folder of its own, so that a file which was reached by
// another door is missing here, or is where none should be.
class ElsewhereFileSystem : public FileSystem {
 public:
  explicit ElsewhereFileSystem(std::string folder) : folder_(std::move(folder)) {}

  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override {
    return disk_.open(folder_ + path, mode, caching);
  }
  Status create_directories(const std::string& path) override {
    return disk_.create_directories(folder_ + path);
  }
  Result<std::vector<std::string>> list_directory(const std::string& path) override {
    return disk_.list_directory(folder_ + path);
  }
  Status rename(const std::string& from, const std::string& to) override {
    return disk_.rename(folder_ + from, folder_ + to);
  }
  Status remove(const std::string& path) override { return disk_.remove(folder_ + path); }
  Status sync_directory(const std::string& path) override {
    return disk_.sync_directory(folder_ + path);
  }
  std::unique_ptr<IoQueue> make_queue(int depth) override { return disk_.make_queue(depth); }

 private:
  const std::string folder_;
  PosixFileSystem disk_;
};

// The disk of the machine.
PosixFileSystem& disk() {
  static PosixFileSystem file_system;
  return file_system;
}

std::unique_ptr<RecordingFileSystem> record(const std::map<std::string, std::string>& initial,
                                            const std::string& folder) {
  DiskTree tree;
  for (const auto& [path, bytes] : initial) tree.emplace(path, contents_of(bytes));
  return std::make_unique<RecordingFileSystem>(disk(), std::move(tree), folder);
}

std::vector<PyTree> trees_after(PowerCuts& cuts, int64_t instant) {
  std::vector<PyTree> out;
  for (const DiskTree& tree : cuts.trees_after(instant).trees) out.push_back(to_python(tree));
  return out;
}

std::string change_before(const PowerCuts& cuts, int64_t instant) {
  return instant == 0 ? "nothing"
                      : to_string(cuts.journal().changes[static_cast<size_t>(instant - 1)]);
}

}  // namespace
}  // namespace torch_ckpt

PYBIND11_MODULE(recorder, module) {
  using namespace torch_ckpt;
  py::module_::import("torch_ckpt._core._native");  // It registers FileSystem.
  py::class_<RecordingFileSystem, FileSystem>(module, "RecordingFileSystem")
      .def(py::init(&record), py::arg("initial"), py::arg("folder"));
  py::class_<HangingFileSystem, FileSystem>(module, "HangingFileSystem")
      .def(py::init<std::string>(), py::arg("fifo"));
  py::class_<SlowFileSystem, FileSystem>(module, "SlowFileSystem")
      .def(py::init<int64_t>(), py::arg("pause_ms"));
  py::class_<ElsewhereFileSystem, FileSystem>(module, "ElsewhereFileSystem")
      .def(py::init<std::string>(), py::arg("folder"));
  py::class_<PowerCuts>(module, "PowerCuts")
      .def(py::init([](const RecordingFileSystem& fs, int64_t limit, int64_t samples,
                       uint32_t seed) {
             return std::make_unique<PowerCuts>(
                 fs.journal(), PowerCutOptions{.limit = limit, .samples = samples, .seed = seed});
           }),
           py::arg("fs"), py::arg("limit"), py::arg("samples"), py::arg("seed"))
      .def_property_readonly("last_instant",
                             [](const PowerCuts& cuts) { return cuts.journal().last_instant(); })
      .def("change_before", &change_before, py::arg("instant"))
      .def("trees_after", &trees_after, py::arg("instant"))
      .def(
          "tree_after_kill",
          [](PowerCuts& cuts, int64_t instant) { return to_python(cuts.tree_after_kill(instant)); },
          py::arg("instant"));
}
