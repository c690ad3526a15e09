#pragma once

// A file system that keeps a journal of every change made through it to another one, in memory or
// real. Crash tests run a save on it, and then ask PowerCuts what the disk may hold after each
// change.
//
// A request counts as done when `wait` reports it; its bytes are taken then. Folders are taken to
// be there unless create_directories made them. Renaming from folder to folder is not in the fault
// model and is refused. Only empty folders are removed.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "io/file_system.h"
#include "support/disk_journal.h"

namespace torch_ckpt {

// Safe to call from any thread, as every FileSystem. Outlives its files and queues.
class RecordingFileSystem : public FileSystem {
 public:
  // `initial` is what `inner` holds, durable, and `folder` one that is there: durable as well if it
  // holds anything, and otherwise made just before by somebody who synced nothing. `inner` outlives
  // this.
  explicit RecordingFileSystem(FileSystem& inner, DiskTree initial = {},
                               const std::string& folder = ".")
      : inner_(inner) {
    add_folders(folder);
    for (const auto& [path, contents] : initial) {
      files_[path] = next_file_++;
      add_folders(parent_directory(path));
    }
    if (initial.empty() && parent_directory(plain(folder)) != plain(folder)) {
      add({.kind = DiskChange::Kind::kCreateDirectory, .path = plain(folder)});
    }
    journal_.initial = std::move(initial);
  }

  DiskJournal journal() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return journal_;
  }

  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override;
  std::unique_ptr<IoQueue> make_queue(int depth) override;

  Result<std::vector<std::string>> list_directory(const std::string& path) override {
    return inner_.list_directory(path);
  }

  Status create_directories(const std::string& path) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(inner_.create_directories(path));
    std::vector<std::string> missing;
    for (std::string folder = plain(path); !folders_.contains(folder);) {
      missing.push_back(folder);
      folder = parent_directory(folder);
    }
    for (; !missing.empty(); missing.pop_back()) {
      add({.kind = DiskChange::Kind::kCreateDirectory, .path = missing.back()});
      add({.kind = DiskChange::Kind::kSyncDirectory, .path = parent_directory(missing.back())});
      folders_.insert(missing.back());
    }
    return ok_status();
  }

  bool renames_directories(const std::string& parent) override {
    return inner_.renames_directories(parent);
  }

  Status sync_directory(const std::string& path) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(inner_.sync_directory(path));
    add({.kind = DiskChange::Kind::kSyncDirectory, .path = plain(path)});
    return ok_status();
  }

  Status rename(const std::string& from, const std::string& to) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(inner_.rename(from, to));
    if (folders_.contains(from)) return rename_folder(from, to);
    const auto found = files_.find(from);
    if (found == files_.end() || parent_directory(from) != parent_directory(to)) {
      return internal_error("cannot record the renaming of ", from, " to ", to);
    }
    const int64_t file = found->second;
    files_.erase(found);
    files_[to] = file;
    add({.kind = DiskChange::Kind::kRename, .path = from, .to = to, .file = file});
    return ok_status();
  }

  Status link(const std::string& from, const std::string& to, bool sync) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(inner_.link(from, to, sync));
    const auto found = files_.find(from);
    if (found == files_.end()) return internal_error("cannot record a link to ", from);
    const int64_t file = found->second;
    files_[to] = file;
    add({.kind = DiskChange::Kind::kLink, .path = to, .file = file});
    if (!sync) return ok_status();
    const int64_t submitted_at = journal_.last_instant();
    add({.kind = DiskChange::Kind::kSync, .path = to, .file = file, .submitted_at = submitted_at});
    return ok_status();
  }

  Status remove(const std::string& path) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(inner_.remove(path));
    if (folders_.erase(path) > 0) return ok_status();  // It was empty, and does not show in a tree.
    if (files_.erase(path) == 0) return internal_error("cannot record the removal of ", path);
    add({.kind = DiskChange::Kind::kRemove, .path = path});
    return ok_status();
  }

 private:
  friend class RecordingFile;
  friend class RecordingQueue;

  static std::string plain(std::string folder) {
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    return folder;
  }

  void add_folders(const std::string& path) {
    std::string folder = plain(path);
    while (folders_.insert(folder).second) folder = parent_directory(folder);
  }

  Status rename_folder(const std::string& from, const std::string& to) {
    if (parent_directory(from) != parent_directory(to)) {
      return internal_error("cannot record the renaming of ", from, " to ", to);
    }
    std::map<std::string, int64_t> files;
    for (const auto& [path, file] : files_) {
      files[path.starts_with(from + "/") ? to + path.substr(from.size()) : path] = file;
    }
    files_ = std::move(files);
    folders_.erase(from);
    folders_.insert(to);
    add({.kind = DiskChange::Kind::kRenameDirectory, .path = from, .to = to});
    return ok_status();
  }

  void add(DiskChange change) { journal_.changes.push_back(std::move(change)); }

  FileSystem& inner_;
  mutable std::mutex mutex_;  // Guards everything below.
  DiskJournal journal_;
  std::map<std::string, int64_t> files_;
  std::set<std::string> folders_ = {"/"};
  int64_t next_file_ = 0;
};

class RecordingFile : public File {
 public:
  RecordingFile(RecordingFileSystem& fs, std::unique_ptr<File> inner, int64_t number)
      : fs_(fs), inner_(std::move(inner)), number_(number) {}

  const std::string& path() const override { return inner_->path(); }
  Result<int64_t> size() const override { return inner_->size(); }
  int64_t alignment() const override { return inner_->alignment(); }
  const std::string& fallback_reason() const override { return inner_->fallback_reason(); }
  bool is_resident(int64_t offset, int64_t nbytes) const override {
    return inner_->is_resident(offset, nbytes);
  }
  Status read(int64_t offset, MutableBytes memory) override { return inner_->read(offset, memory); }
  Status write(int64_t offset, Bytes bytes) override {
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    const int64_t submitted_at = fs_.journal_.last_instant();
    const Status status = inner_->write(offset, bytes);
    fs_.add({.kind = DiskChange::Kind::kWrite,
             .path = path(),
             .file = number_,
             .offset = offset,
             .bytes = contents_of(std::string(as_text(bytes))),
             .submitted_at = submitted_at,
             .failed = !status.ok()});
    return status;
  }
  Status preallocate(int64_t nbytes) override {
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    return resized(inner_->preallocate(nbytes), nbytes);
  }
  Status truncate(int64_t nbytes) override {
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    return resized(inner_->truncate(nbytes), nbytes);
  }

 private:
  friend class RecordingQueue;

  Status resized(Status status, int64_t nbytes) {
    if (status.ok()) {
      fs_.add(
          {.kind = DiskChange::Kind::kResize, .path = path(), .file = number_, .nbytes = nbytes});
    }
    return status;
  }

  RecordingFileSystem& fs_;
  const std::unique_ptr<File> inner_;
  const int64_t number_;
};

class RecordingQueue : public IoQueue {
 public:
  RecordingQueue(RecordingFileSystem& fs, std::unique_ptr<IoQueue> inner)
      : fs_(fs), inner_(std::move(inner)) {}
  ~RecordingQueue() override {
    while (in_flight() > 0) (void)wait();
  }

  const QueueMode& mode() const override { return inner_->mode(); }
  void register_memory(MutableBytes memory) override { inner_->register_memory(memory); }
  int room() const override { return inner_->room(); }
  int in_flight() const override { return inner_->in_flight(); }

  void submit(std::span<const IoRequest> requests) override {
    std::vector<IoRequest> passed_on;
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    for (const IoRequest& request : requests) {
      pending_[next_tag_] = {request, fs_.journal_.last_instant()};
      passed_on.push_back(request);
      passed_on.back().file = static_cast<RecordingFile*>(request.file)->inner_.get();
      passed_on.back().tag = next_tag_++;  // The caller's tags need not differ.
    }
    inner_->submit(passed_on);
  }

  std::span<const IoDone> wait() override {
    done_.clear();
    for (const IoDone& done : inner_->wait()) {
      const auto found = pending_.find(done.tag);
      record(found->second, !done.status.ok());
      done_.push_back({found->second.request.tag, done.status});
      pending_.erase(found);
    }
    return done_;
  }

 private:
  struct Pending {
    IoRequest request;
    int64_t submitted_at;
  };

  void record(const Pending& pending, bool failed) {
    const IoRequest& request = pending.request;
    if (request.kind == IoRequest::Kind::kRead) return;
    const bool writes = request.kind == IoRequest::Kind::kWrite;
    const std::lock_guard<std::mutex> lock(fs_.mutex_);
    fs_.add({.kind = writes ? DiskChange::Kind::kWrite : DiskChange::Kind::kSync,
             .path = request.file->path(),
             .file = static_cast<RecordingFile*>(request.file)->number_,
             .offset = request.offset,
             .bytes = writes ? contents_of(std::string(as_text(request.memory))) : nullptr,
             .submitted_at = pending.submitted_at,
             .failed = failed});
  }

  RecordingFileSystem& fs_;
  const std::unique_ptr<IoQueue> inner_;
  std::map<uint64_t, Pending> pending_;  // By the tag that the inner queue knows.
  uint64_t next_tag_ = 0;
  std::vector<IoDone> done_;
};

inline Result<std::unique_ptr<File>> RecordingFileSystem::open(const std::string& path,
                                                               OpenMode mode, Caching caching) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ASSIGN_OR_RETURN(std::unique_ptr<File> file, inner_.open(path, mode, caching));
  if (mode == OpenMode::kCreate) {
    files_[path] = next_file_++;
    add({.kind = DiskChange::Kind::kCreate, .path = path, .file = files_[path]});
  }
  const auto found = files_.find(path);
  const int64_t number = found == files_.end() ? -1 : found->second;
  return std::unique_ptr<File>(new RecordingFile(*this, std::move(file), number));
}

inline std::unique_ptr<IoQueue> RecordingFileSystem::make_queue(int depth) {
  return std::make_unique<RecordingQueue>(*this, inner_.make_queue(depth));
}

}  // namespace torch_ckpt
