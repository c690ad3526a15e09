#pragma once

// The one door to disks.
//
// Everything above this header names files and moves bytes only through `FileSystem`, so a test
// can stand in for the disk: keep it in memory, fail one chosen operation, or cut the power
// between two of them.
//
// Control and data part here. `FileSystem` and `File` do the rare, named things one at a time;
// `IoQueue` moves the bytes with many requests in flight, and is the only hot path.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"

namespace torch_ckpt {

enum class OpenMode {
  kRead,    // The file must exist.
  kCreate,  // Must not exist: data files and temporaries have names of their own.
  kShare,   // Created unless another process has: several write it at the same time.
};

enum class Caching {
  kDirect,    // Past the page cache (O_DIRECT), where the file system allows it.
  kBuffered,  // Through the page cache.
};

// An open file. Closed by its destructor, which drops errors: what must last is synced first.
class File {
 public:
  virtual ~File() = default;

  virtual const std::string& path() const = 0;
  virtual Result<int64_t> size() const = 0;

  // Offsets, lengths and memory addresses of direct requests must be multiples of this. 1 means
  // every request is buffered: asked for, or fallen back to because the file system refuses
  // O_DIRECT.
  virtual int64_t alignment() const = 0;

  // Why alignment() is 1 although kDirect was asked for; empty otherwise.
  virtual const std::string& fallback_reason() const = 0;

  // Whether the page cache holds all of [offset, offset + nbytes), so that a buffered read of it
  // would not touch the disk. False where the kernel cannot tell.
  virtual bool is_resident(int64_t offset, int64_t nbytes) const = 0;

  // Reads these bytes through the page cache and returns when they are there: for what is small and
  // rare, and not worth a queue. Errors: those of a read in `IoDone`.
  virtual Status read(int64_t offset, MutableBytes memory) = 0;

  // Writes exactly these bytes through the page cache and returns when it has them: what other
  // processes write to the same page at the same time stays. Errors: as for `read`.
  virtual Status write(int64_t offset, Bytes bytes) = 0;

  // Reserves room, and makes the file `nbytes` long, so that writes neither run out of space nor
  // move the end of the file.
  virtual Status preallocate(int64_t nbytes) = 0;

  // Makes the file exactly `nbytes` long.
  virtual Status truncate(int64_t nbytes) = 0;
};

// A read lies within the file, with one exception: a direct read may reach past the end of the
// file, up to the next multiple of file->alignment(), since its length has to be one. Such a read
// is OK when it got every byte up to the end, as the file was then; what follows in `memory` is
// unspecified. At alignment() 1 there is nothing to round up, and no exception.
//
// kSync covers the writes that were done, as returned by `wait`, before it was submitted.
struct IoRequest {
  enum class Kind { kRead, kWrite, kSync };

  Kind kind;
  File* file;                          // Outlives the request.
  int64_t offset = 0;                  // Ignored by kSync.
  MutableBytes memory = {};            // Read into, or written from; outlives the request.
  Caching caching = Caching::kDirect;  // kDirect needs file->alignment() to hold.
  uint64_t tag = 0;                    // The caller's own name for it, returned in `IoDone`.
};

struct IoDone {
  uint64_t tag;
  Status status;  // OK means every byte: short transfers and EINTR are resumed below this line. A
                  // read past the end of the file (but see IoRequest) is a kCorruption that names
                  // file and offset. After an error, any of the bytes may have moved.
};

// How a queue moves bytes, for people to read.
struct QueueMode {
  std::string name;         // "io_uring" or "threads".
  bool registered = false;  // Whether buffers are registered with the kernel.
  std::string reason;       // Why it is not io_uring with registered buffers; empty when it is.
};

// Requests in flight. One thread owns a queue; a process may have many queues.
class IoQueue {
 public:
  virtual ~IoQueue() = default;  // Waits for everything in flight.

  virtual const QueueMode& mode() const = 0;

  // How many more requests `submit` would take now. Bounded, so memory in flight is bounded.
  virtual int room() const = 0;
  virtual int in_flight() const = 0;

  // Hands requests over and returns without waiting for the device; they may finish in any order.
  // Requires: requests.size() <= room().
  virtual void submit(std::span<const IoRequest> requests) = 0;

  // Waits until at least one request is done. The view is valid until the next call.
  // Requires: something is in flight.
  virtual std::span<const IoDone> wait() = 0;
};

// Names. Safe to call from any thread. Paths are ordinary ones of the operating system.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                             Caching caching) = 0;

  // Creates `path` and whatever folders above it are missing, and syncs the folder above each one
  // it created.
  virtual Status create_directories(const std::string& path) = 0;

  // The names in a folder, sorted, without "." and "..".
  virtual Result<std::vector<std::string>> list_directory(const std::string& path) = 0;

  // Atomic: a reader sees the old file under `to` or the new one. Survives a power cut only after
  // `sync_directory` of the folder that holds `to`.
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  virtual Status remove(const std::string& path) = 0;
  virtual Status sync_directory(const std::string& path) = 0;

  // `registered` may name memory that most requests will use, for the queue to register with the
  // kernel; it outlives the queue.
  virtual std::unique_ptr<IoQueue> make_queue(int depth, MutableBytes registered = {}) = 0;
};

// The folder that holds `path`: "a" for "a/b" and "a/b/", "." for "b", "/" for "/b".
std::string parent_directory(std::string_view path);

// Creates `path` with these bytes, and syncs it when `sync` is set. On an error the file may exist
// with some of the bytes.
Status write_file(FileSystem& fs, const std::string& path, Bytes bytes, bool sync);

}  // namespace torch_ckpt
