#include "io/upload.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "base/blocked_signals.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kMinPartNbytes = int64_t{8} << 20;
constexpr int64_t kMaxParts = 10'000;  // The limit of S3. Others allow more.

}  // namespace

int64_t part_nbytes(int64_t object_nbytes) {
  const int64_t least = object_nbytes / (kMaxParts / 2) + 1;
  return std::max(kMinPartNbytes, align_up(least, int64_t{1} << 20));
}

// What the writer, the client and the leases of windows share.
struct Upload::State {
  explicit State(const std::string& object) : path(object) {}

  // Returns the error of a call. Requires: the lock.
  Status status() const {
    if (is_done && !result.ok()) return result;
    if (is_abandoned) return cancelled("the upload of ", path, " was abandoned");
    return ok_status();
  }

  const std::string path;
  std::mutex mutex;  // Guards the members below.
  std::condition_variable changed;
  std::vector<std::byte> small;  // The bytes of an object that may fit one part.
  std::deque<Window> windows;    // Those that the client has not pulled yet.
  int64_t end = 0;               // End of all bytes that were passed on.
  int64_t copied_nbytes = 0;     // Copies of bytes in memory.
  bool is_complete = false;      // No more windows follow.
  bool is_drained = false;       // The client has found that out.
  bool is_abandoned = false;
  bool is_done = false;  // The client has returned.
  Status result;         // What it returned.
};

// Bytes that were copied, the lease of a window. The maker counts them.
struct Upload::Copy {
  Copy(std::shared_ptr<State> shared, std::vector<std::byte> copied)
      : state(std::move(shared)), bytes(std::move(copied)) {}
  ~Copy() {
    const std::lock_guard lock(state->mutex);
    state->copied_nbytes -= ssize(bytes);
    state->changed.notify_all();
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  const std::shared_ptr<State> state;
  const std::vector<std::byte> bytes;
};

// What the client pulls from.
class Upload::Source final : public Windows {
 public:
  explicit Source(State& state) : state_(state) {}

  Result<std::optional<Window>> next() override {
    std::unique_lock lock(state_.mutex);
    state_.changed.wait(
        lock, [&] { return state_.is_abandoned || state_.is_complete || !state_.windows.empty(); });
    if (state_.is_abandoned) return state_.status();
    if (state_.windows.empty()) {
      state_.is_drained = true;
      return std::optional<Window>();
    }
    std::optional<Window> window(std::move(state_.windows.front()));
    state_.windows.pop_front();
    return window;
  }

 private:
  State& state_;
};

Upload::Upload(ObjectStore& store, std::string path)
    : store_(store), path_(std::move(path)), state_(std::make_shared<State>(path_)) {}

Upload::~Upload() {
  abandon();
  if (thread_.joinable()) thread_.join();
}

void Upload::expect(int64_t nbytes) { expected_nbytes_ = nbytes; }

int64_t Upload::part_nbytes() const { return torch_ckpt::part_nbytes(expected_nbytes_); }

void Upload::start(int64_t window_nbytes, int in_flight) {
  has_started_ = true;
  // Every window lies in one part, so that its memory waits for this part only.
  part_nbytes_ = align_up(part_nbytes(), window_nbytes);
  // The windows of a part must leave one request for the end of the stream.
  copies_ = part_nbytes_ / window_nbytes >= in_flight;
  const BlockedSignals blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    state_->is_done = true;
    state_->result = errno_status(error.code().value(), str_cat("cannot start to upload ", path_));
    state_->changed.notify_all();
  }
}

void Upload::run() {
  Source source(*state_);
  Status status = store_.put_stream(path_, part_nbytes_, source);
  std::deque<Window> unused;  // Their leases take the lock.
  {
    const std::lock_guard lock(state_->mutex);
    if (status.ok() && !state_->is_drained) {
      status = internal_error("the client has finished ", path_, " before its end");
    }
    state_->result = std::move(status);
    state_->is_done = true;
    unused.swap(state_->windows);
    state_->changed.notify_all();
  }
}

Status Upload::write(int64_t offset, Bytes bytes, int in_flight) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.end == offset || !state.status().ok(); });
  RETURN_IF_ERROR(state.status());
  if (state.is_complete) return internal_error("cannot write ", path_, ": it has ended");
  if (bytes.empty()) return ok_status();
  if (!has_started_) {
    const int64_t most = part_nbytes();
    if (expected_nbytes_ <= most && state.end + ssize(bytes) <= most) {
      state.small.insert(state.small.end(), bytes.begin(), bytes.end());
      state.end += ssize(bytes);
      state.changed.notify_all();
      return ok_status();
    }
    if (!state.small.empty()) {
      const auto copy = std::make_shared<Copy>(state_, std::move(state.small));
      state.copied_nbytes += ssize(copy->bytes);
      state.windows.push_back({copy->bytes, copy});
    }
    start(ssize(bytes), in_flight);
    RETURN_IF_ERROR(state.status());
  }
  return copies_ ? pass_copy(std::move(lock), bytes) : pass(std::move(lock), bytes);
}

// Passes the writer's own memory.
Status Upload::pass(std::unique_lock<std::mutex> lock, Bytes bytes) {
  State& state = *state_;
  bool is_released = false;
  const auto release = [&](void*) {
    const std::lock_guard lease_lock(state.mutex);
    is_released = true;
    state.changed.notify_all();  // With the lock: this call returns once it has it.
  };
  state.windows.push_back({bytes, std::shared_ptr<void>(&state, release)});
  state.end += ssize(bytes);
  state.changed.notify_all();
  state.changed.wait(lock, [&] { return is_released; });  // If the client fails, by `run`.
  return state.status();
}

Status Upload::pass_copy(std::unique_lock<std::mutex> lock, Bytes bytes) {
  State& state = *state_;
  // The client retains less than one part until more bytes arrive, and releases the rest by itself.
  state.changed.wait(
      lock, [&] { return state.copied_nbytes < 2 * part_nbytes_ || !state.status().ok(); });
  RETURN_IF_ERROR(state.status());
  lock.unlock();  // No other write proceeds until `end` has moved.
  auto copy = std::make_shared<Copy>(state_, std::vector<std::byte>(bytes.begin(), bytes.end()));
  lock.lock();
  state.copied_nbytes += ssize(bytes);
  if (Status failed = state.status(); !failed.ok()) {  // The client reads no more windows.
    lock.unlock();                                     // The destructor of the copy locks.
    return failed;
  }
  state.windows.push_back({copy->bytes, std::move(copy)});
  state.end += ssize(bytes);
  state.changed.notify_all();
  return ok_status();
}

Status Upload::finish(int64_t nbytes) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.end == nbytes || !state.status().ok(); });
  RETURN_IF_ERROR(state.status());
  state.is_complete = true;
  if (!has_started_) {
    lock.unlock();
    return store_.put(path_, state.small, {});
  }
  state.changed.notify_all();
  state.changed.wait(lock, [&] { return state.is_done || state.is_abandoned; });
  return state.status();
}

void Upload::abandon() {
  const std::lock_guard lock(state_->mutex);
  state_->is_abandoned = true;
  state_->changed.notify_all();
}

}  // namespace torch_ckpt
