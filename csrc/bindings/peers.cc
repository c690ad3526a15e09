// Peers over torch's point-to-point transfers, which are called through Python: torch releases the
// GIL while it waits for one. No exception of torch leaves this file.

#include "engine/exchange/peers.h"

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
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

// A message, or its acknowledgement by the receiver.
enum class Purpose : uint8_t { kMessage, kAcknowledgement };
constexpr int kPurposes = 2;

// Returns the tag that identifies a transfer between two ranks. In-flight transfers have different
// tags.
int tag_of(Channel channel, int64_t number, Purpose purpose) {
  constexpr int kTags = kChannels * kPurposes;
  constexpr int64_t kNumbers = std::numeric_limits<int32_t>::max() / kTags;
  return static_cast<int>(number % kNumbers) * kTags + static_cast<int>(channel) * kPurposes +
         static_cast<int>(purpose);
}

// Tag of no transfer.
constexpr int kUnusedTag = std::numeric_limits<int32_t>::max() - 2;

// Bound of the wait until the last acknowledgement has left.
constexpr std::chrono::seconds kLastTimeout{10};

// What acknowledges a message. It outlives each send for which nobody waits.
std::byte acknowledgement{1};

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
//
// If a connection breaks, gloo ends the waits for messages from the peer, but not the wait for a
// message to it that is partly written. So no thread waits for gloo to send: a message counts as
// sent once its acknowledgement has arrived.
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

  // To start a transfer, lock it, then acquire the GIL. Backends number transfers as they start.
  std::mutex& mutex() { return mutex_; }

  // Retains a send for which nobody waits: gloo sends nothing more to a rank once a send that it
  // has not completed is freed.
  void retain(std::shared_ptr<PyObject> send) {
    const std::lock_guard<std::mutex> lock(mutex_);
    retained_.push_back(std::move(send));
  }

  // Closes the connections, which ends all transfers of this rank and of its peers. Python has no
  // call for it, but gloo closes them if a transfer is late. Safe to call from any thread.
  void close(int32_t peer) {
    std::byte never_sent{};
    (void)with_torch("close the connections", [&]() -> Status {
      // Raises if the connection to this peer is broken, or breaks now. Then the others remain, and
      // the transfers with their peers close them.
      const py::object late = begin("recv", &never_sent, 1, peer, kUnusedTag);
      late.attr("wait")(std::chrono::milliseconds(1));
      return ok_status();
    });
  }

 private:
  const std::shared_ptr<PyObject> backend_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<PyObject>> retained_;  // Guarded by `mutex_`.
};

class BackendTransfer : public PeerTransfer {
 public:
  BackendTransfer(std::shared_ptr<Wire> wire, int32_t peer, std::chrono::milliseconds timeout,
                  std::string what)
      : wire_(std::move(wire)), peer_(peer), timeout_(timeout), what_(std::move(what)) {}

  Status wait() override {
    const Status status = complete();
    is_over_ = true;
    return status;
  }

  void abort() override {
    if (!is_over_) wire_->close(peer_);
  }

 protected:
  virtual Status complete() = 0;

  // Starts a transfer of bytes with the peer.
  Result<std::shared_ptr<PyObject>> start(const char* method, MutableBytes bytes, int tag) {
    const std::lock_guard<std::mutex> lock(wire_->mutex());
    return with_torch(what_, [&]() -> Result<std::shared_ptr<PyObject>> {
      return owned_by_any_thread(wire_->begin(method, bytes.data(), bytes.size(), peer_, tag));
    });
  }

  Status wait_for(const std::shared_ptr<PyObject>& work, std::chrono::milliseconds timeout) {
    return with_torch(what_, [&]() -> Status {
      if (py::handle(work.get()).attr("wait")(timeout).cast<bool>()) return ok_status();
      return cancelled("cannot ", what_, ": the transfer was aborted");
    });
  }

  const std::shared_ptr<Wire> wire_;
  const int32_t peer_;
  const std::chrono::milliseconds timeout_;

 private:
  const std::string what_;
  std::atomic<bool> is_over_ = false;
};

class BackendSend : public BackendTransfer {
 public:
  using BackendTransfer::BackendTransfer;

  Status begin(MutableBytes bytes, Channel channel, int64_t number) {
    if (channel == Channel::kCopied) {
      bytes = {&acknowledgement, 1};
    } else {
      const int tag = tag_of(channel, number, Purpose::kAcknowledgement);
      ASSIGN_OR_RETURN(acknowledged_, start("recv", {&received_, 1}, tag));
    }
    ASSIGN_OR_RETURN(sent_, start("send", bytes, tag_of(channel, number, Purpose::kMessage)));
    return ok_status();
  }

 private:
  Status complete() override {
    if (acknowledged_ == nullptr) {  // It is an acknowledgement itself.
      wire_->retain(std::move(sent_));
      return ok_status();
    }
    RETURN_IF_ERROR(wait_for(acknowledged_, timeout_));
    return wait_for(sent_, timeout_);
  }

  std::byte received_{};
  std::shared_ptr<PyObject> acknowledged_;
  std::shared_ptr<PyObject> sent_;
};

class BackendReceive : public BackendTransfer {
 public:
  using BackendTransfer::BackendTransfer;

  Status begin(MutableBytes memory, Channel channel, int64_t number) {
    channel_ = channel;
    number_ = number;
    ASSIGN_OR_RETURN(received_, start("recv", memory, tag_of(channel, number, Purpose::kMessage)));
    return ok_status();
  }

 private:
  Status complete() override {
    RETURN_IF_ERROR(wait_for(received_, timeout_));
    if (channel_ == Channel::kCopied) return ok_status();
    const int tag = tag_of(channel_, number_, Purpose::kAcknowledgement);
    ASSIGN_OR_RETURN(auto sent, start("send", {&acknowledgement, 1}, tag));
    // After the end of the exchange, the connections are closed.
    if (channel_ == Channel::kEnd) return wait_for(sent, kLastTimeout);
    wire_->retain(std::move(sent));
    return ok_status();
  }

  Channel channel_ = Channel::kPieces;
  int64_t number_ = 0;
  std::shared_ptr<PyObject> received_;
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
    return begin<BackendSend>({const_cast<std::byte*>(bytes.data()), bytes.size()}, rank, channel,
                              number, str_cat("send ", bytes.size(), " bytes to ", name_of(rank)));
  }

  Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank, Channel channel,
                                                int64_t number) override {
    return begin<BackendReceive>(memory, rank, channel, number,
                                 str_cat("receive ", memory.size(), " bytes from ", name_of(rank)));
  }

 private:
  template <typename Transfer>
  Result<std::unique_ptr<PeerTransfer>> begin(MutableBytes memory, int32_t rank, Channel channel,
                                              int64_t number, std::string what) {
    const bool is_last = std::is_same_v<Transfer, BackendReceive> && channel == Channel::kEnd;
    auto transfer =
        std::make_unique<Transfer>(wire_, rank, is_last ? kForever : timeout_, std::move(what));
    RETURN_IF_ERROR(transfer->begin(memory, channel, number));
    return std::unique_ptr<PeerTransfer>(std::move(transfer));
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
