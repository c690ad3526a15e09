// Peers over torch's point-to-point transfers. Threads of the engine wait for transfers without the
// GIL. No exception of torch leaves this file.

#include "engine/exchange/peers.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/peers.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// Timeout of transfers that last as long as the load.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

// Returns the first line of an error message of torch or gloo, without its source location.
std::string reason_of(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(". This is typically"));  // Drop gloo's generic advice.
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

// Returns the tag that identifies a transfer between two ranks. In-flight transfers have different
// tags.
int tag_of(Channel channel, int64_t number) {
  constexpr int64_t kNumbers = std::numeric_limits<int32_t>::max() / kChannels;
  return static_cast<int>(number % kNumbers) * kChannels + static_cast<int>(channel);
}

at::Tensor bytes_at(std::byte* data, size_t nbytes) {
  return at::from_blob(data, {static_cast<int64_t>(nbytes)}, at::TensorOptions(at::kByte));
}

class BackendTransfer : public PeerTransfer {
 public:
  BackendTransfer(c10::intrusive_ptr<c10d::Work> work, std::chrono::milliseconds timeout,
                  std::string what)
      : work_(std::move(work)), timeout_(timeout), what_(std::move(what)) {}

  Status wait() override {
    try {
      if (work_->wait(timeout_)) return ok_status();
      return cancelled("cannot ", what_, ": the transfer was aborted");
    } catch (const std::exception& error) {
      return cancelled("cannot ", what_, ": ", reason_of(error));
    }
  }

  void abort() override {
    try {
      work_->abort();
    } catch (const std::exception&) {
      // The transfer ends by its timeout.
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::chrono::milliseconds timeout_;
  const std::string what_;
};

class BackendPeers : public Peers {
 public:
  // `ranks` has the global rank of each rank of the group, for messages.
  BackendPeers(c10::intrusive_ptr<c10d::Backend> backend, std::vector<int32_t> ranks,
               std::chrono::milliseconds timeout)
      : backend_(std::move(backend)), ranks_(std::move(ranks)), timeout_(timeout) {}

  std::string name_of(int32_t rank) const override {
    return str_cat("rank ", ranks_.at(static_cast<size_t>(rank)));
  }

  Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                             int64_t number) override {
    return begin(const_cast<std::byte*>(bytes.data()), bytes.size(), timeout_,
                 str_cat("send ", bytes.size(), " bytes to ", name_of(rank)),
                 [&](std::vector<at::Tensor>& tensors) {
                   return backend_->send(tensors, rank, tag_of(channel, number));
                 });
  }

  Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank, Channel channel,
                                                int64_t number) override {
    return begin(memory.data(), memory.size(), channel == Channel::kEnd ? kForever : timeout_,
                 str_cat("receive ", memory.size(), " bytes from ", name_of(rank)),
                 [&](std::vector<at::Tensor>& tensors) {
                   return backend_->recv(tensors, rank, tag_of(channel, number));
                 });
  }

 private:
  template <typename Begin>
  Result<std::unique_ptr<PeerTransfer>> begin(std::byte* data, size_t nbytes,
                                              std::chrono::milliseconds timeout, std::string what,
                                              const Begin& begin) {
    try {
      std::vector<at::Tensor> tensors = {bytes_at(data, nbytes)};
      const std::lock_guard<std::mutex> lock(mutex_);
      return std::unique_ptr<PeerTransfer>(
          std::make_unique<BackendTransfer>(begin(tensors), timeout, std::move(what)));
    } catch (const std::exception& error) {
      return cancelled("cannot ", what, ": ", reason_of(error));
    }
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::vector<int32_t> ranks_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // Serializes the start of transfers: backends number them.
};

std::shared_ptr<Peers> make_peers(c10::intrusive_ptr<c10d::Backend> backend,
                                  std::vector<int32_t> ranks, int64_t timeout_ms) {
  return std::make_shared<BackendPeers>(std::move(backend), std::move(ranks),
                                        std::chrono::milliseconds(timeout_ms));
}

}  // namespace

void bind_peers(py::module_& module) {
  module.def("make_peers", &make_peers, py::arg("backend"), py::arg("ranks"),
             py::arg("timeout_ms"));
}

}  // namespace torch_ckpt
