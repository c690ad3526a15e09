#pragma once

// An object store in memory that tests can look into and break.
//
// Every call is recorded, and each part of an upload is one; a chosen call fails, or is carried out
// and then fails. An upload holds windows until they make a part, and stores parts from threads of
// its own, as the clients of real stores do. Memory that is used again too early shows as wrong
// bytes.

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/object_store.h"
#include "io/store_file_system.h"

namespace torch_ckpt {

struct StoreCall {
  enum class Kind {
    kFind,
    kGet,
    kPut,
    kStream,    // Begins an upload.
    kPart,      // One part of it.
    kComplete,  // Ends it: the object appears.
    kList,
    kCopy,
    kRemove,
    kRemoveAll,
  };

  Kind kind;
  std::string path;
  int64_t nbytes = 0;
};

class MemoryObjectStore : public ObjectStore {
 public:
  static constexpr int kMostParts = 8;  // Of one upload, at a time.

  // ---- Faults ----

  // Call number `n`, counting from now and from 0, fails with this status; no other does. With
  // `is_carried_out`, the store does what was asked, and only its answer is lost.
  void fail_call(int64_t n, Status status, bool is_carried_out = false) {
    const std::lock_guard lock(mutex_);
    until_fault_ = n;
    has_failed_ = false;
    fault_ = std::move(status);
    is_carried_out_ = is_carried_out;
  }
  // From call number `n` on, every one fails.
  void fail_from(int64_t n, Status status) {
    fail_call(n, std::move(status));
    const std::lock_guard lock(mutex_);
    stays_failed_ = true;
  }
  // Forgets which call is to fail. Returns whether it has failed.
  bool clear_fault() {
    const std::lock_guard lock(mutex_);
    until_fault_ = -1;
    stays_failed_ = false;
    return std::exchange(has_failed_, false);
  }
  // Writes every object, whether its condition is true or not.
  void ignore_conditions() { ignores_conditions_ = true; }

  // Parts and reads stall, from now until `resume_transfers`.
  void stall_transfers() {
    const std::lock_guard lock(mutex_);
    stalls_ = true;
  }
  void resume_transfers() {
    const std::lock_guard lock(mutex_);
    stalls_ = false;
    changed_.notify_all();
  }
  // Waits until so many of them stall.
  void wait_for_stalled(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stalled_ >= count; });
  }

  // ---- What was asked for, and what is there. These are no calls. ----

  std::vector<StoreCall> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  int64_t count(StoreCall::Kind kind) const {
    const std::lock_guard lock(mutex_);
    return std::ranges::count(calls_, kind, &StoreCall::kind);
  }
  std::vector<std::string> paths() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> paths;
    for (const auto& [path, object] : objects_) paths.push_back(path);
    return paths;
  }
  std::optional<std::string> contents(const std::string& path) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(path);
    if (found == objects_.end()) return std::nullopt;
    return std::string(as_text(found->second.bytes));
  }
  void set(const std::string& path, std::string_view text) {
    const std::lock_guard lock(mutex_);
    store(path, as_bytes(text));
  }
  // Bytes of windows that uploads hold now, and that they held at most.
  int64_t held_nbytes() const {
    const std::lock_guard lock(mutex_);
    return held_nbytes_;
  }
  int64_t most_held_nbytes() const {
    const std::lock_guard lock(mutex_);
    return most_held_nbytes_;
  }

  // ---- ObjectStore ----

  Result<Found> find(const std::string& path, int64_t start_nbytes) override {
    Found out;
    RETURN_IF_ERROR(carry_out({StoreCall::Kind::kFind, path, start_nbytes}, [&]() -> Status {
      const auto found = objects_.find(path);
      if (found == objects_.end()) return missing("find", path);
      const Object& object = found->second;
      const Bytes start = slice(object.bytes, 0, std::min(start_nbytes, ssize(object.bytes)));
      out = {ssize(object.bytes), object.version, object.modified_s, {start.begin(), start.end()}};
      return ok_status();
    }));
    return out;
  }

  Result<Window> get(const std::string& path, int64_t offset, int64_t nbytes) override {
    wait_out_stall();
    Window out;
    RETURN_IF_ERROR(carry_out({StoreCall::Kind::kGet, path, nbytes}, [&]() -> Status {
      const auto found = objects_.find(path);
      if (found == objects_.end()) return missing("read", path);
      const Bytes all = found->second.bytes;
      if (!range_within(offset, nbytes, ssize(all))) return corruption(path, " ends early");
      const Bytes bytes = slice(all, offset, nbytes);
      const auto copy = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
      out = {*copy, copy};
      return ok_status();
    }));
    return out;
  }

  Status put(const std::string& path, Bytes bytes, const Condition& condition) override {
    return carry_out({StoreCall::Kind::kPut, path, ssize(bytes)}, [&]() -> Status {
      const auto found = objects_.find(path);
      const std::string version = found == objects_.end() ? "" : found->second.version;
      using Kind = Condition::Kind;
      const bool is_true = ignores_conditions_ || condition.kind == Kind::kNone ||
                           version == (condition.kind == Kind::kAbsent ? "" : condition.version);
      if (!is_true) return errno_status(EEXIST, str_cat("cannot write ", path));
      store(path, bytes);
      return ok_status();
    });
  }

  Status put_stream(const std::string& path, int64_t part_nbytes, Windows& windows) override;

  Result<std::vector<std::string>> list(const std::string& path) override {
    std::vector<std::string> names;
    RETURN_IF_ERROR(carry_out({StoreCall::Kind::kList, path}, [&] {
      for (const auto& [key, object] : objects_) {
        if (!key.starts_with(path + "/")) continue;
        const std::string rest = key.substr(path.size() + 1);
        const std::string name = rest.substr(0, rest.find('/'));
        if (std::ranges::find(names, name) == names.end()) names.insert(names.begin(), name);
      }
      return ok_status();
    }));
    return names;
  }

  bool copies() const override { return true; }

  Status copy(const std::string& from, const std::string& to) override {
    return carry_out({StoreCall::Kind::kCopy, from}, [&]() -> Status {
      const auto found = objects_.find(from);
      if (found == objects_.end()) return missing("copy", from);
      store(to, std::vector<std::byte>(found->second.bytes));
      return ok_status();
    });
  }

  Status remove(const std::string& path) override {
    return carry_out({StoreCall::Kind::kRemove, path}, [&] {
      objects_.erase(path);
      return ok_status();
    });
  }

  Status remove_all(const std::string& path) override {
    return carry_out({StoreCall::Kind::kRemoveAll, path}, [&] {
      std::erase_if(objects_, [&](const auto& entry) {
        return entry.first == path || entry.first.starts_with(path + "/");
      });
      return ok_status();
    });
  }

 private:
  class Parts;

  struct Object {
    std::vector<std::byte> bytes;
    std::string version;
    double modified_s = 0;
  };

  static Status missing(const char* what, const std::string& path) {
    return errno_status(ENOENT, str_cat("cannot ", what, " ", path));
  }

  // Requires: the lock.
  void store(const std::string& path, Bytes bytes) {
    ++writes_;
    objects_[path] = {
        {bytes.begin(), bytes.end()}, str_cat("version ", writes_), static_cast<double>(writes_)};
  }

  void wait_out_stall() {
    std::unique_lock lock(mutex_);
    ++stalled_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !stalls_; });
    --stalled_;
  }

  template <typename Work>
  Status carry_out(StoreCall call, Work&& work) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    const bool fails = until_fault_ == 0;
    if (until_fault_ > 0 || (fails && !stays_failed_)) --until_fault_;
    has_failed_ = has_failed_ || fails;
    if (fails && !is_carried_out_) return fault_;
    Status status = work();
    return fails ? fault_ : status;
  }

  mutable std::mutex mutex_;  // Guards everything below.
  std::condition_variable changed_;
  std::map<std::string, Object> objects_;
  std::vector<StoreCall> calls_;
  int64_t writes_ = 0;
  int64_t held_nbytes_ = 0;
  int64_t most_held_nbytes_ = 0;
  int stalled_ = 0;
  bool stalls_ = false;
  bool ignores_conditions_ = false;
  int64_t until_fault_ = -1;  // Calls that still succeed; -1 if no fault is to come.
  bool has_failed_ = false;
  bool is_carried_out_ = false;
  bool stays_failed_ = false;
  Status fault_;
};

// The parts of one upload.
class MemoryObjectStore::Parts {
 public:
  Parts(MemoryObjectStore& store, std::string path, int64_t part_nbytes)
      : store_(store), path_(std::move(path)), part_nbytes_(part_nbytes) {}
  ~Parts() {
    (void)join();
    drop(held_);
  }

  // Takes a window once fewer parts than kMostParts are in flight. Returns the error of a part.
  Status add(Window window) {
    {
      std::unique_lock lock(store_.mutex_);
      store_.changed_.wait(lock, [&] { return running_ < kMostParts; });
      RETURN_IF_ERROR(status_);
      store_.held_nbytes_ += ssize(window.bytes);
      store_.most_held_nbytes_ = std::max(store_.most_held_nbytes_, store_.held_nbytes_);
    }
    for (Bytes rest = window.bytes; !rest.empty();) {
      const int64_t count = std::min(ssize(rest), part_nbytes_ - held_nbytes_);
      held_.push_back({slice(rest, 0, count), window.lease});
      held_nbytes_ += count;
      rest = rest.subspan(static_cast<size_t>(count));
      if (held_nbytes_ == part_nbytes_) begin_part();
    }
    return ok_status();
  }

  // Stores the last part, and waits for all.
  Result<std::vector<std::byte>> finish() {
    if (!held_.empty()) begin_part();
    RETURN_IF_ERROR(join());
    std::vector<std::byte> all;
    for (const auto& part : stored_) all.insert(all.end(), part.begin(), part.end());
    return all;
  }

 private:
  void begin_part() {
    const size_t number = stored_.size();
    const std::lock_guard lock(store_.mutex_);
    stored_.emplace_back();
    ++running_;
    held_nbytes_ = 0;
    threads_.emplace_back(
        [this, number, windows = std::exchange(held_, {})]() mutable { run(number, windows); });
  }

  void run(size_t number, std::vector<Window>& windows) {
    std::vector<std::byte> part;
    store_.wait_out_stall();
    for (const Window& window : windows) {
      part.insert(part.end(), window.bytes.begin(), window.bytes.end());
    }
    const StoreCall call = {StoreCall::Kind::kPart, path_, ssize(part)};
    const Status status = store_.carry_out(call, [] { return ok_status(); });
    drop(windows);
    const std::lock_guard lock(store_.mutex_);
    stored_[number] = std::move(part);
    if (status_.ok()) status_ = status;
    --running_;
    store_.changed_.notify_all();
  }

  Status join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return status_;
  }

  void drop(std::vector<Window>& windows) {
    int64_t nbytes = 0;
    for (const Window& window : windows) nbytes += ssize(window.bytes);
    {
      const std::lock_guard lock(store_.mutex_);
      store_.held_nbytes_ -= nbytes;
    }
    windows.clear();
  }

  MemoryObjectStore& store_;
  const std::string path_;
  const int64_t part_nbytes_;
  std::vector<Window> held_;
  int64_t held_nbytes_ = 0;
  std::vector<std::thread> threads_;
  int running_ = 0;                             // Guarded by the store's mutex, as those below.
  std::vector<std::vector<std::byte>> stored_;  // In order.
  Status status_;
};

inline Status MemoryObjectStore::put_stream(const std::string& path, int64_t part_nbytes,
                                            Windows& windows) {
  RETURN_IF_ERROR(carry_out({StoreCall::Kind::kStream, path}, [] { return ok_status(); }));
  Parts parts(*this, path, part_nbytes);
  for (;;) {
    ASSIGN_OR_RETURN(std::optional<Window> window, windows.next());
    if (!window) break;
    RETURN_IF_ERROR(parts.add(*std::move(window)));
  }
  ASSIGN_OR_RETURN(const std::vector<std::byte> all, parts.finish());
  return carry_out({StoreCall::Kind::kComplete, path, ssize(all)}, [&] {
    store(path, all);
    return ok_status();
  });
}

// The file system over a store in memory.
class MemoryStoreFileSystem : public StoreFileSystem {
 public:
  MemoryStoreFileSystem() : MemoryStoreFileSystem(new MemoryObjectStore) {}

  MemoryObjectStore& store;  // NOLINT(misc-non-private-member-variables-in-classes)

 private:
  explicit MemoryStoreFileSystem(MemoryObjectStore* made)
      : StoreFileSystem(std::unique_ptr<ObjectStore>(made)), store(*made) {}
};

}  // namespace torch_ckpt
