#pragma once

// A disk in memory that tests can look into and break.
//
// Files are byte vectors. Every operation is counted and recorded; a chosen one fails, or is the
// last before the process is killed. A queue carries a request out only when `wait` reports it, in
// a seeded random order: a buffer that is used again too early shows as wrong bytes. What
// io/file_system.h asks of its callers (alignment, room, lifetimes) is checked at every request; a
// breach fails the test.
//
// Folders are not kept: a file may be created under any name.

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "io/file_system.h"
#include "support/disk_journal.h"

namespace torch_ckpt {

struct MemoryOptions {
  int64_t alignment = 4096;  // Of files opened with kDirect; 1 is a disk that refuses O_DIRECT.
  bool resident = false;     // What is_resident() says.
  uint32_t seed = 1;         // Of the order in which requests finish.
};

// One operation that was asked for.
struct Operation {
  enum class Kind {
    kOpen,
    kSize,
    kPreallocate,
    kTruncate,
    kRead,
    kWrite,
    kSync,
    kCreateDirectories,
    kListDirectory,
    kRename,
    kRemove,
    kSyncDirectory,
    kLink,
  };

  Kind kind;
  std::string path;
  int64_t offset = 0;
  int64_t nbytes = 0;
  bool direct = false;
};

// Safe to call from any thread, as every FileSystem. Outlives its files and queues.
class MemoryFileSystem : public FileSystem {
 public:
  explicit MemoryFileSystem(const MemoryOptions& options = {})
      : options_(options), random_(options.seed) {}

  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override;
  std::unique_ptr<IoQueue> make_queue(int depth) override;
  Result<std::vector<std::string>> list_directory(const std::string& path) override;

  Status create_directories(const std::string& path) override {
    return begin({Operation::Kind::kCreateDirectories, path});
  }
  Status sync_directory(const std::string& path) override {
    return begin({Operation::Kind::kSyncDirectory, path});
  }
  Status rename(const std::string& from, const std::string& to) override {
    RETURN_IF_ERROR(begin({Operation::Kind::kRename, from}));
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = files_.find(from);
    if (found == files_.end()) return rename_folder(from, to);
    files_[to] = found->second;
    files_.erase(from);
    return ok_status();
  }
  Status link(const std::string& from, const std::string& to, bool) override {
    RETURN_IF_ERROR(begin({Operation::Kind::kLink, from}));
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = files_.find(from);
    if (found == files_.end()) return errno_status(ENOENT, "cannot link " + from);
    if (!files_.try_emplace(to, found->second).second) {
      return errno_status(EEXIST, "cannot link to " + to);
    }
    return ok_status();
  }
  Status remove(const std::string& path) override {
    RETURN_IF_ERROR(begin({Operation::Kind::kRemove, path}));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (files_.erase(path) == 0) return errno_status(ENOENT, "cannot remove " + path);
    return ok_status();
  }

  // Operation number `n`, counting from now and from 0, fails with this status; no other does. A
  // failing transfer leaves some of its bytes moved and some spoilt.
  void fail_operation(int64_t n, Status status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    until_fault_ = n;
    has_failed_ = false;
    fault_ = std::move(status);
  }

  // Forgets which operation is to fail. Returns whether it has failed.
  bool clear_fault() {
    const std::lock_guard<std::mutex> lock(mutex_);
    until_fault_ = -1;
    return std::exchange(has_failed_, false);
  }

  // From operation number `n` on, counting as above, the process is dead: every operation fails
  // with kCancelled and has no effect, those that would clean up included.
  void kill_at(int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    killed_from_ = std::ssize(operations_) + n;
  }
  bool was_killed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return killed();
  }

  // What was asked for so far, in order.
  std::vector<Operation> operations() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return operations_;
  }
  int64_t count(Operation::Kind kind) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::count_if(operations_.begin(), operations_.end(),
                         [kind](const Operation& operation) { return operation.kind == kind; });
  }

  // For the test itself: these are no operations.
  std::optional<std::string> contents(const std::string& path) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = files_.find(path);
    if (found == files_.end()) return std::nullopt;
    return std::string(as_text(*found->second));
  }
  void put(const std::string& path, std::string_view contents) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Bytes bytes = as_bytes(contents);
    files_[path] = std::make_shared<Data>(bytes.begin(), bytes.end());
  }
  std::vector<std::string> paths() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> paths;
    for (const auto& [path, data] : files_) paths.push_back(path);
    return paths;
  }
  void put(const DiskTree& tree) {
    for (const auto& [path, bytes] : tree) put(path, *bytes);
  }
  DiskTree tree() const {
    DiskTree tree;
    for (const std::string& path : paths()) tree[path] = contents_of(*contents(path));
    return tree;
  }
  int most_open_files() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return most_open_files_;
  }

 private:
  friend class MemoryFile;
  friend class MemoryQueue;
  using Data = std::vector<std::byte>;

  // Requires: mutex_ is held.
  Status rename_folder(const std::string& from, const std::string& to) {
    const auto is_in = [](const std::string& path, const std::string& folder) {
      return path.starts_with(folder + "/");
    };
    std::map<std::string, std::shared_ptr<Data>> files;
    bool exists = false;
    for (const auto& [path, data] : files_) {
      if (is_in(path, to)) return errno_status(ENOTEMPTY, "cannot rename " + from);
      exists = exists || is_in(path, from);
      files[is_in(path, from) ? to + path.substr(from.size()) : path] = data;
    }
    if (!exists) return errno_status(ENOENT, "cannot rename " + from);
    files_ = std::move(files);
    return ok_status();
  }

  // Counts and records an operation. Not OK where it is the one to fail.
  Status begin(Operation operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    operations_.push_back(std::move(operation));
    if (killed()) return cancelled("the process has been killed");
    if (until_fault_ < 0 || until_fault_-- > 0) return ok_status();
    has_failed_ = true;
    return fault_;
  }

  bool killed() const { return killed_from_ >= 0 && std::ssize(operations_) > killed_from_; }

  const MemoryOptions options_;
  mutable std::mutex mutex_;  // Guards everything below, and the bytes of all files.
  std::mt19937 random_;
  std::map<std::string, std::shared_ptr<Data>> files_;
  std::vector<Operation> operations_;
  int open_files_ = 0;
  int most_open_files_ = 0;
  int64_t until_fault_ = -1;  // Operations that still succeed; -1 where no fault is to come.
  bool has_failed_ = false;
  Status fault_;
  int64_t killed_from_ = -1;  // The first operation of a dead process; -1 where it lives on.
};

class MemoryFile : public File {
 public:
  MemoryFile(MemoryFileSystem& fs, std::string path, std::shared_ptr<MemoryFileSystem::Data> data,
             OpenMode mode, Caching caching)
      : fs_(fs),
        path_(std::move(path)),
        data_(std::move(data)),
        mode_(mode),
        alignment_(caching == Caching::kDirect ? fs.options_.alignment : 1),
        fallback_reason_(caching == Caching::kDirect && alignment_ == 1 ? "memory" : "") {}

  ~MemoryFile() override {
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    EXPECT_EQ(in_flight_, 0) << path_ << " closed while requests are in flight";
    --fs_.open_files_;
  }

  const std::string& path() const override { return path_; }
  int64_t alignment() const override { return alignment_; }
  const std::string& fallback_reason() const override { return fallback_reason_; }
  bool is_resident(int64_t, int64_t) const override { return fs_.options_.resident; }

  Result<int64_t> size() const override {
    RETURN_IF_ERROR(fs_.begin({Operation::Kind::kSize, path_}));
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    return ssize(*data_);
  }
  Status read(int64_t offset, MutableBytes memory) override {
    const Status fault = fs_.begin({Operation::Kind::kRead, path_, offset, ssize(memory)});
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    if (!range_within(offset, ssize(memory), ssize(*data_))) {
      return corruption("cannot read ", memory.size(), " bytes at ", offset, " of ", path_,
                        ": the file is ", data_->size(), " bytes long");
    }
    std::copy_n(data_->begin() + offset, memory.size(), memory.begin());
    if (!fault.ok()) std::ranges::fill(memory, std::byte{0xEE});
    return fault;
  }
  Status write(int64_t offset, Bytes bytes) override {
    const Status fault = fs_.begin({Operation::Kind::kWrite, path_, offset, ssize(bytes)});
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    if (fs_.killed()) return fault;
    const auto end = static_cast<size_t>(offset) + bytes.size();
    if (data_->size() < end) data_->resize(end);
    std::copy_n(bytes.begin(), bytes.size() / (fault.ok() ? 1 : 2), data_->begin() + offset);
    return fault;
  }
  Status preallocate(int64_t nbytes) override {
    RETURN_IF_ERROR(fs_.begin({Operation::Kind::kPreallocate, path_, 0, nbytes}));
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    data_->resize(static_cast<size_t>(nbytes));
    return ok_status();
  }
  Status truncate(int64_t nbytes) override {
    RETURN_IF_ERROR(fs_.begin({Operation::Kind::kTruncate, path_, 0, nbytes}));
    if (mode_ == OpenMode::kRead) return errno_status(EINVAL, "cannot truncate " + path_);
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    data_->resize(static_cast<size_t>(nbytes));
    return ok_status();
  }

 private:
  friend class MemoryQueue;

  MemoryFileSystem& fs_;
  const std::string path_;
  const std::shared_ptr<MemoryFileSystem::Data> data_;
  const OpenMode mode_;
  const int64_t alignment_;
  const std::string fallback_reason_;
  int in_flight_ = 0;  // Guarded by the file system's mutex.
};

class MemoryQueue : public IoQueue {
 public:
  MemoryQueue(MemoryFileSystem& fs, int depth) : fs_(fs), depth_(depth) {}
  ~MemoryQueue() override {
    while (!pending_.empty()) (void)wait();
  }

  const QueueMode& mode() const override { return mode_; }
  int room() const override { return depth_ - in_flight(); }
  int in_flight() const override { return static_cast<int>(pending_.size()); }

  void submit(std::span<const IoRequest> requests) override {
    EXPECT_LE(static_cast<int>(requests.size()), room()) << "more requests than there is room for";
    for (const IoRequest& request : requests) {
      auto& file = static_cast<MemoryFile&>(*request.file);
      if (is_direct(request)) {
        const auto address = reinterpret_cast<uintptr_t>(request.memory.data());
        EXPECT_EQ(address % static_cast<uintptr_t>(file.alignment_), 0u) << "address";
        EXPECT_EQ(request.offset % file.alignment_, 0) << "offset of a direct request";
        EXPECT_EQ(ssize(request.memory) % file.alignment_, 0) << "length of a direct request";
      }
      const std::lock_guard<std::mutex> lock(fs_.mutex_);
      ++file.in_flight_;
      pending_.push_back(request);
    }
  }

  std::span<const IoDone> wait() override {
    done_.clear();
    EXPECT_FALSE(pending_.empty()) << "nothing to wait for";
    if (pending_.empty()) return done_;
    for (size_t left = 1 + random() % pending_.size(); left > 0; --left) {
      std::swap(pending_[random() % pending_.size()], pending_.back());
      const IoRequest request = pending_.back();
      pending_.pop_back();
      done_.push_back({request.tag, carry_out(request)});
    }
    return done_;
  }

 private:
  static bool is_direct(const IoRequest& request) {
    return request.kind != IoRequest::Kind::kSync && request.caching == Caching::kDirect &&
           request.file->alignment() > 1;
  }

  size_t random() {
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    return fs_.random_();
  }

  Status carry_out(const IoRequest& request) {
    auto& file = static_cast<MemoryFile&>(*request.file);
    const Operation::Kind kinds[] = {Operation::Kind::kRead, Operation::Kind::kWrite,
                                     Operation::Kind::kSync};
    const Status fault = fs_.begin({kinds[static_cast<int>(request.kind)], file.path_,
                                    request.offset, ssize(request.memory), is_direct(request)});
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    --file.in_flight_;
    if (fs_.killed()) return fault;
    Status status;
    if (request.kind == IoRequest::Kind::kRead) {
      status = read(request, *file.data_);
      if (!fault.ok()) std::ranges::fill(request.memory, std::byte{0xEE});
    } else if (request.kind == IoRequest::Kind::kWrite) {
      const int64_t nbytes = ssize(request.memory) / (fault.ok() ? 1 : 2);
      const auto end = static_cast<size_t>(request.offset + nbytes);
      if (file.data_->size() < end) file.data_->resize(end);
      std::copy_n(request.memory.begin(), nbytes, file.data_->begin() + request.offset);
    }
    return fault.ok() ? status : fault;
  }

  static Status read(const IoRequest& request, const MemoryFileSystem::Data& data) {
    const int64_t end = request.offset + ssize(request.memory);
    const int64_t grain = is_direct(request) ? request.file->alignment() : 1;
    if (end > align_up(ssize(data), grain)) {
      return corruption("cannot read ", request.memory.size(), " bytes at ", request.offset, " of ",
                        request.file->path(), ": the file is ", data.size(), " bytes long");
    }
    std::copy(data.begin() + request.offset, data.begin() + std::min(end, ssize(data)),
              request.memory.begin());
    return ok_status();
  }

  MemoryFileSystem& fs_;
  const int depth_;
  const QueueMode mode_ = {.name = "memory", .registered = false, .reason = "a test"};
  std::vector<IoRequest> pending_;
  std::vector<IoDone> done_;
};

inline Result<std::unique_ptr<File>> MemoryFileSystem::open(const std::string& path, OpenMode mode,
                                                            Caching caching) {
  RETURN_IF_ERROR(begin({Operation::Kind::kOpen, path}));
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool create = mode == OpenMode::kCreate;
  if (create == files_.contains(path)) {
    return errno_status(create ? EEXIST : ENOENT, "cannot open " + path);
  }
  std::shared_ptr<Data>& data = files_[path];
  if (data == nullptr) data = std::make_shared<Data>();
  most_open_files_ = std::max(most_open_files_, ++open_files_);
  return std::unique_ptr<File>(new MemoryFile(*this, path, data, mode, caching));
}

inline std::unique_ptr<IoQueue> MemoryFileSystem::make_queue(int depth) {
  return std::make_unique<MemoryQueue>(*this, depth);
}

inline Result<std::vector<std::string>> MemoryFileSystem::list_directory(const std::string& path) {
  RETURN_IF_ERROR(begin({Operation::Kind::kListDirectory, path}));
  std::vector<std::string> names;
  for (const std::string& file : paths()) {
    if (!file.starts_with(path + "/")) continue;
    const std::string rest = file.substr(path.size() + 1);
    if (const std::string name = rest.substr(0, rest.find('/'));
        names.empty() || names.back() != name) {
      names.push_back(name);
    }
  }
  return names;
}

}  // namespace torch_ckpt
