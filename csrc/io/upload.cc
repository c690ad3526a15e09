#include "io/upload.h"

#include <signal.h>

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

namespace torch_ckpt {
namespace {

constexpr int64_t kMinPartNbytes = int64_t{8} << 20;
constexpr int64_t kMaxParts = 10'000;  // The limit of S3. Others allow more.

}  // namespace

int64_t part_nbytes(int64_t object_nbytes) {
  const int64_t least = object_nbytes / (kMaxParts / 2) + 1;
  return std::max(kMinPartNbytes, align_up(least, int64_t{1} << 20));
}

// What the client pulls from.
class Upload::Source final : public Windows {
 public:
  explicit Source(Upload& upload) : upload_(upload) {}

  Result<std::optional<Window>> next() override {
    std::unique_lock lock(upload_.mutex_);
    upload_.changed_.wait(lock, [&] {
      return upload_.is_abandoned_ || upload_.is_complete_ || !upload_.windows_.empty();
    });
    if (upload_.is_abandoned_) return cancelled("the upload of ", upload_.path_, " was abandoned");
    if (upload_.windows_.empty()) return std::optional<Window>();
    std::optional<Window> window(std::move(upload_.windows_.front()));
    upload_.windows_.pop_front();
    return window;
  }

 private:
  Upload& upload_;
};

Upload::~Upload() {
  abandon();
  if (thread_.joinable()) thread_.join();
}

void Upload::expect(int64_t nbytes) { expected_nbytes_ = nbytes; }

void Upload::start() {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // A new thread inherits the mask.
  has_started_ = true;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    is_done_ = true;
    status_ = errno_status(error.code().value(), str_cat("cannot start to upload ", path_));
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Upload::run() {
  Source source(*this);
  Status status = store_.put_stream(path_, part_nbytes(expected_nbytes_), source);
  std::deque<Window> unused;  // Their leases take the lock.
  {
    const std::lock_guard lock(mutex_);
    if (status.ok() && !is_complete_) {
      status = internal_error("the client has written ", path_, " before its end");
    }
    status_ = std::move(status);
    is_done_ = true;
    unused.swap(windows_);
  }
  changed_.notify_all();
}

Status Upload::state() const {
  if (is_done_ && !status_.ok()) return status_;
  if (is_abandoned_) return cancelled("the upload of ", path_, " was abandoned");
  return ok_status();
}

Status Upload::write(int64_t offset, Bytes bytes) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return end_ == offset || !state().ok(); });
  if (!has_started_) {
    const int64_t most = part_nbytes(expected_nbytes_);
    if (expected_nbytes_ <= most && end_ + ssize(bytes) <= most) {
      small_.insert(small_.end(), bytes.begin(), bytes.end());
      end_ += ssize(bytes);
      changed_.notify_all();
      return ok_status();
    }
    start();
    if (!small_.empty()) {
      const auto owned = std::make_shared<std::vector<std::byte>>(std::move(small_));
      windows_.push_back({*owned, owned});
    }
  }
  RETURN_IF_ERROR(state());
  bool is_released = false;
  const auto release = [&](void*) {
    const std::lock_guard lease_lock(mutex_);
    is_released = true;
    changed_.notify_all();  // With the lock: this call returns once it has it.
  };
  windows_.push_back({bytes, std::shared_ptr<void>(this, release)});
  end_ += ssize(bytes);
  changed_.notify_all();
  changed_.wait(lock, [&] { return is_released; });  // If the client fails, by `run`.
  return state();
}

Status Upload::finish(int64_t nbytes) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return end_ == nbytes || !state().ok(); });
  RETURN_IF_ERROR(state());
  is_complete_ = true;
  if (!has_started_) {
    lock.unlock();
    return store_.put(path_, small_, {});
  }
  changed_.notify_all();
  changed_.wait(lock, [&] { return is_done_ || is_abandoned_; });
  return state();
}

void Upload::abandon() {
  const std::lock_guard lock(mutex_);
  is_abandoned_ = true;
  changed_.notify_all();
}

}  // namespace torch_ckpt
