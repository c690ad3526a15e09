// Peers over torch's point-to-point transfers, which are called through Python: torch releases the
// GIL while it waits for one. No exception of torch leaves this file.

#include "engine/exchange/peers.h"

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "bindings/peers.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Timeout of transfers that last as long as the load.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

// Returns the first line of an error message of torch or gloo, without its source location.
std::string reason_of(std::string text) {
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(". This is typically"));  // Drop gloo's generic advice.
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

// Calls torch with the GIL. Its exceptions become the status.
template <typename Work>
auto with_torch(const std::string& what, Work&& work) -> decltype(work()) {
  const py::gil_scoped_acquire locked;
  try {
    return std::forward<Work>(work)();
  } catch (py::error_already_set& error) {
    return cancelled("cannot ", what, ": ", reason_of(py::str(error.value())));
  } catch (const std::exception& error) {
    return cancelled("cannot ", what, ": ", reason_of(error.what()));
  }
}

// Returns the tag that identifies a transfer between two ranks. In-flight transfers have different
// tags.
int tag_of(Channel channel, int64_t number) {
  constexpr int64_t kNumbers = std::numeric_limits<int32_t>::max() / kChannels;
  return static_cast<int>(number % kNumbers) * kChannels + static_cast<int>(channel);
}

// Tag of no transfer.
constexpr int kUnusedTag = std::numeric_limits<int32_t>::max() - 2;

py::object bytes_at(std::byte* data, size_t nbytes) {
  const py::module_ torch = py::module_::import("torch");
  const py::object dtype = torch.attr("uint8");
  if (nbytes == 0)
    return torch.attr("empty")(0, py::arg("dtype") = dtype, py::arg("device") = "cpu");
  const auto memory =
      py::memoryview::from_memory(static_cast<void*>(data), static_cast<py::ssize_t>(nbytes));
  return torch.attr("frombuffer")(memory, py::arg("dtype") = dtype);
}

// The connections of an exchange: a backend of torch.
class Wire {
 public:
  explicit Wire(py::object backend) : backend_(owned_by_any_thread(std::move(backend))) {}

  // Starts a transfer by the method "send" or "recv". Requires: the GIL.
  py::object begin(const char* method, std::byte* data, size_t nbytes, int32_t rank, int tag) {
    py::list tensors;
    tensors.append(bytes_at(data, nbytes));
    const py::object start = py::handle(backend_.get()).attr(method);
    return start(tensors, rank, tag);
  }

  // Closes the connections, which ends all transfers of this rank and of its peers. Python has no
  // call for it, but gloo closes them if a transfer is late. Safe to call from any thread.
  void close(int32_t peer) {
    if (is_closed_.exchange(true)) return;
    std::byte never_sent{};
    (void)with_torch("close the connections", [&]() -> Status {
      const py::object late = begin("recv", &never_sent, 1, peer, kUnusedTag);
      late.attr("wait")(std::chrono::milliseconds(1));
      return ok_status();
    });
  }

  std::mutex& mutex() { return mutex_; }

 private:
  const std::shared_ptr<PyObject> backend_;
  std::atomic<bool> is_closed_ = false;
  std::mutex mutex_;  // Serializes the start of transfers: backends number them.
};

class BackendTransfer : public PeerTransfer {
 public:
  BackendTransfer(std::shared_ptr<Wire> wire, int32_t peer, py::object work,
                  std::chrono::milliseconds timeout, std::string what)
      : wire_(std::move(wire)),
        peer_(peer),
        work_(owned_by_any_thread(std::move(work))),
        timeout_(timeout),
        what_(std::move(what)) {}

  Status wait() override {
    const Status status = with_torch(what_, [&]() -> Status {
      if (py::handle(work_.get()).attr("wait")(timeout_).cast<bool>()) return ok_status();
      return cancelled("cannot ", what_, ": the transfer was aborted");
    });
    is_over_ = true;
    return status;
  }

  void abort() override {
    if (!is_over_) wire_->close(peer_);
  }

 private:
  const std::shared_ptr<Wire> wire_;
  const int32_t peer_;
  const std::shared_ptr<PyObject> work_;
  const std::chrono::milliseconds timeout_;
  const std::string what_;
  std::atomic<bool> is_over_ = false;
};

class BackendPeers : public Peers {
 public:
  // `ranks` has the global rank of each rank of the group, for messages.
  BackendPeers(py::object backend, std::vector<int32_t> ranks, std::chrono::milliseconds timeout)
      : wire_(std::make_shared<Wire>(std::move(backend))),
        ranks_(std::move(ranks)),
        timeout_(timeout) {}

  std::string name_of(int32_t rank) const override {
    return str_cat("rank ", ranks_.at(static_cast<size_t>(rank)));
  }

  Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                             int64_t number) override {
    return begin("send", {const_cast<std::byte*>(bytes.data()), bytes.size()}, rank,
                 tag_of(channel, number), timeout_,
                 str_cat("send ", bytes.size(), " bytes to ", name_of(rank)));
  }

  Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank, Channel channel,
                                                int64_t number) override {
    return begin("recv", memory, rank, tag_of(channel, number),
                 channel == Channel::kEnd ? kForever : timeout_,
                 str_cat("receive ", memory.size(), " bytes from ", name_of(rank)));
  }

 private:
  Result<std::unique_ptr<PeerTransfer>> begin(const char* method, MutableBytes memory, int32_t rank,
                                              int tag, std::chrono::milliseconds timeout,
                                              std::string what) {
    const std::lock_guard<std::mutex> lock(wire_->mutex());
    return with_torch(what, [&]() -> Result<std::unique_ptr<PeerTransfer>> {
      py::object work = wire_->begin(method, memory.data(), memory.size(), rank, tag);
      return std::unique_ptr<PeerTransfer>(
          std::make_unique<BackendTransfer>(wire_, rank, std::move(work), timeout, what));
    });
  }

  const std::shared_ptr<Wire> wire_;
  const std::vector<int32_t> ranks_;
  const std::chrono::milliseconds timeout_;
};

std::shared_ptr<Peers> make_peers(py::object backend, std::vector<int32_t> ranks,
                                  int64_t timeout_ms) {
  return std::make_shared<BackendPeers>(std::move(backend), std::move(ranks),
                                        std::chrono::milliseconds(timeout_ms));
}

}  // namespace

void bind_peers(py::module_& module) {
  module.def("make_peers", &make_peers, py::arg("backend"), py::arg("ranks"),
             py::arg("timeout_ms"));
}

}  // namespace torch_ckpt
