// Peers over torch's point-to-point transfers. Waiting is done in threads of the engine, which hold
// no GIL; nothing that torch throws leaves this file.

#include "engine/peers.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/peers.h"

namespace py = pybind11;

namespace torch_ckpt {
namespace {

// For what may last as long as the load.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

// What torch and gloo say, without where in their own sources they say so.
std::string reason_of(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(". This is typically"));  // Gloo's advice, for a program's own.
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

// What tells transfers between two ranks apart; no two with the same are ever under way at once.
int tag_of(Channel channel, int64_t number) {
  constexpr int64_t kNumbers = std::numeric_limits<int32_t>::max() / kChannels;
  return static_cast<int>(number % kNumbers) * kChannels + static_cast<int>(channel);
}

// In ordinary memory, or in that of a GPU.
at::Tensor bytes_at(std::byte* data, size_t nbytes, int gpu) {
  at::TensorOptions options(at::kByte);
  if (gpu >= 0) options = options.device(at::kCUDA, static_cast<at::DeviceIndex>(gpu));
  return at::from_blob(data, {static_cast<int64_t>(nbytes)}, options);
}

class BackendTransfer : public PeerTransfer {
 public:
  BackendTransfer(c10::intrusive_ptr<c10d::Work> work, std::chrono::milliseconds timeout,
                  std::string what)
      : work_(std::move(work)), timeout_(timeout), what_(std::move(what)) {}

  Status wait() override {
    try {
      if (work_->wait(timeout_)) return ok_status();
      return cancelled("stopped to ", what_);
    } catch (const std::exception& error) {
      return cancelled("cannot ", what_, ": ", reason_of(error));
    }
  }

  void abort() override {
    try {
      work_->abort();
    } catch (const std::exception&) {
      // It ends by its timeout.
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::chrono::milliseconds timeout_;
  const std::string what_;
};

// Between GPUs. Torch's `wait` would have a stream wait, and hold up what others put behind it.
class GpuTransfer : public PeerTransfer {
 public:
  GpuTransfer(c10::intrusive_ptr<c10d::Work> work, std::chrono::milliseconds timeout,
              std::string what)
      : work_(std::move(work)), timeout_(timeout), what_(std::move(what)) {}

  // Aborts in the thread that waits, so that no transfer waits for another to be aborted.
  Status wait() override {
    const auto end = std::chrono::steady_clock::now() + timeout_;
    try {
      while (!work_->isCompleted()) {
        const bool late = std::chrono::steady_clock::now() >= end;
        if (aborted_ || late) {
          work_->abort();
          return cancelled(late ? "waited too long to " : "stopped to ", what_);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      if (const std::exception_ptr error = work_->exception()) {
        work_->abort();
        std::rethrow_exception(error);
      }
      return ok_status();
    } catch (const std::exception& error) {
      return cancelled("cannot ", what_, ": ", reason_of(error));
    }
  }

  void abort() override { aborted_ = true; }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::chrono::milliseconds timeout_;
  const std::string what_;
  std::atomic<bool> aborted_ = false;
};

// A group whose backend knows numbers, or one that is a link without them.
class BackendPeers : public Peers {
 public:
  // `gpu`: in whose memory all bytes are; -1 for ordinary memory.
  // `ranks`: what people call those of the group.
  BackendPeers(c10::intrusive_ptr<c10d::Backend> backend, std::vector<int32_t> ranks,
               std::chrono::milliseconds timeout, bool knows_numbers, int gpu)
      : backend_(std::move(backend)),
        ranks_(std::move(ranks)),
        timeout_(timeout),
        knows_numbers_(knows_numbers),
        gpu_(gpu) {}

  std::string name_of(int32_t rank) const override {
    return str_cat("rank ", ranks_.at(static_cast<size_t>(rank)));
  }

  Result<std::unique_ptr<PeerTransfer>> send(Bytes bytes, int32_t rank, Channel channel,
                                             int64_t number) override {
    return begin(const_cast<std::byte*>(bytes.data()), bytes.size(), timeout_,
                 str_cat("send ", bytes.size(), " bytes to ", name_of(rank)),
                 [&](std::vector<at::Tensor>& tensors) {
                   return backend_->send(tensors, rank, tag(channel, number));
                 });
  }

  Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes memory, int32_t rank, Channel channel,
                                                int64_t number) override {
    return begin(memory.data(), memory.size(), channel == Channel::kEnd ? kForever : timeout_,
                 str_cat("receive ", memory.size(), " bytes from ", name_of(rank)),
                 [&](std::vector<at::Tensor>& tensors) {
                   return backend_->recv(tensors, rank, tag(channel, number));
                 });
  }

 private:
  int tag(Channel channel, int64_t number) const {
    return knows_numbers_ ? tag_of(channel, number) : 0;
  }

  template <typename Begin>
  Result<std::unique_ptr<PeerTransfer>> begin(std::byte* data, size_t nbytes,
                                              std::chrono::milliseconds timeout, std::string what,
                                              const Begin& begin) {
    try {
      std::vector<at::Tensor> tensors = {bytes_at(data, nbytes, gpu_)};
      std::unique_lock<std::mutex> lock(mutex_);
      auto work = begin(tensors);
      lock.unlock();
      if (gpu_ >= 0) {
        return std::unique_ptr<PeerTransfer>(
            std::make_unique<GpuTransfer>(std::move(work), timeout, std::move(what)));
      }
      return std::unique_ptr<PeerTransfer>(
          std::make_unique<BackendTransfer>(std::move(work), timeout, std::move(what)));
    } catch (const std::exception& error) {
      return cancelled("cannot ", what, ": ", reason_of(error));
    }
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::vector<int32_t> ranks_;
  const std::chrono::milliseconds timeout_;
  const bool knows_numbers_;
  const int gpu_;
  std::mutex mutex_;  // Backends count what they begin.
};

std::shared_ptr<Peers> make_peers(c10::intrusive_ptr<c10d::Backend> backend,
                                  std::vector<int32_t> ranks, int64_t timeout_ms) {
  return std::make_shared<BackendPeers>(std::move(backend), std::move(ranks),
                                        std::chrono::milliseconds(timeout_ms), true, -1);
}

std::shared_ptr<Peers> make_link(c10::intrusive_ptr<c10d::Backend> backend,
                                 std::vector<int32_t> ranks, int64_t timeout_ms, int gpu) {
  return std::make_shared<BackendPeers>(std::move(backend), std::move(ranks),
                                        std::chrono::milliseconds(timeout_ms), false, gpu);
}

}  // namespace

void bind_peers(py::module_& module) {
  module.def("make_peers", &make_peers, py::arg("backend"), py::arg("ranks"),
             py::arg("timeout_ms"));
  module.def("make_link", &make_link, py::arg("backend"), py::arg("ranks"), py::arg("timeout_ms"),
             py::arg("gpu"));
}

}  // namespace torch_ckpt
