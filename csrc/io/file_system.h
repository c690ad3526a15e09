#pragma once

// The interface to disks.
//
// All other code names files and moves bytes only through `FileSystem`. A test can therefore
// replace the disk: store files in memory, fail one chosen operation, or simulate a power cut
// between two operations.
//
// `FileSystem` and `File` perform rare operations on named files, one at a time. `IoQueue` is the
// hot path: it moves the bytes, with many requests in flight.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "io/window.h"

namespace torch_ckpt {

enum class OpenMode {
  kRead,    // The file must exist.
  kCreate,  // The file must not exist: data files and temporary files have unique names. A store
            // of streams may replace an existing file.
  kUpdate,  // The file must exist. Several processes may write it concurrently.
};

enum class Caching {
  kDirect,    // Bypass the page cache (O_DIRECT) if the file system supports it.
  kBuffered,  // Use the page cache.
};

// An open file. The destructor closes the file and ignores errors: callers sync data that must be
// durable.
class File {
 public:
  virtual ~File() = default;

  virtual const std::string& path() const = 0;
  virtual Result<int64_t> size() const = 0;

  // Offsets, lengths and memory addresses of direct requests must be multiples of this. 1 means
  // that every request is buffered: the caller chose kBuffered, or the file system refused
  // O_DIRECT.
  virtual int64_t alignment() const = 0;

  // The reason for alignment() == 1 on a kDirect file; empty otherwise.
  virtual const std::string& fallback_reason() const = 0;

  // Returns whether all of [offset, offset + nbytes) is in the page cache, so that a buffered read
  // needs no disk access. False if the kernel cannot report it.
  virtual bool is_resident(int64_t offset, int64_t nbytes) const = 0;

  // Reads through the page cache, synchronously. For small, rare reads.
  // Errors: those of a read in `IoDone`.
  virtual Status read(int64_t offset, MutableBytes memory) = 0;

  // Writes exactly these bytes through the page cache, synchronously. Concurrent writes by other
  // processes to the rest of the same page are preserved.
  // Errors: as for `read`.
  virtual Status write(int64_t offset, Bytes bytes) = 0;

  // Reserves disk space and sets the file size to `nbytes`. Later writes then cannot run out of
  // space and do not extend the file.
  virtual Status preallocate(int64_t nbytes) = 0;

  // Sets the file size to `nbytes`.
  virtual Status truncate(int64_t nbytes) = 0;

  // The length of the parts of a new stream: a write of a whole part is complete without the bytes
  // that follow. 0 if the file is not a stream.
  virtual int64_t part_nbytes() const { return 0; }

  // Makes writes in flight to a stream fail soon, and removes what it has written. Any thread may
  // call it. No effect on other files.
  virtual void abandon() {}
};

// The capabilities of a file system. The engine decides by these, and not by its type.
struct Traits {
  // Whether `publish` replaces a file only if it still has the version that the caller knows.
  // Otherwise `rename` publishes a file.
  bool publishes_by_condition = false;
  // Whether a file can be written at any offset, several times, and read meanwhile. Otherwise a new
  // file is a stream: each write begins where an earlier one ends, the last ones are complete only
  // with kSync, and kSync ends the file, which then appears. `offset` of the kSync is its length.
  bool writes_at_offsets = true;
  // Whether a folder exists by itself. Otherwise it is a prefix of names: every folder exists, and
  // is empty if no name begins with it.
  bool has_folders = true;
  // Longer requests gain nothing.
  int64_t request_nbytes = int64_t{4} << 20;
  // Reading this many unwanted bytes is cheaper than another request.
  int64_t max_gap_nbytes = int64_t{32} << 10;
  // Whether long ranges get separate requests, which read into the destination. Otherwise copying
  // the bytes is cheaper than another request.
  bool reads_in_place = true;
};

// An I/O request.
//
// A read must lie within the file, with one exception. A direct read may end after the end of the
// file, at the next multiple of file->alignment(), since its length must be aligned. Such a read is
// OK if it returns every byte up to the current end of the file. The rest of `memory` is then
// unspecified. There is no exception if alignment() is 1.
//
// kSync covers the writes that `wait` returned before the kSync was submitted, and of a stream
// those before its offset.
struct IoRequest {
  enum class Kind { kRead, kWrite, kSync };

  Kind kind;
  File* file;                          // Must outlive the request.
  int64_t offset = 0;                  // Ignored by kSync, except that of a stream.
  MutableBytes memory = {};            // Target of a read, source of a write; outlives the request.
  Caching caching = Caching::kDirect;  // kDirect requires alignment to file->alignment().
  uint64_t tag = 0;                    // Caller-defined; returned in `IoDone`.
  // If given, a read may set it to its bytes in other memory, and leave `memory` as it is. It
  // outlives the request.
  Window* received = nullptr;
};

struct IoDone {
  uint64_t tag;
  // OK means that every byte was transferred: the queue resumes short transfers and EINTR. A read
  // past the end of the file (but see IoRequest) is kCorruption with file and offset. After an
  // error, any subset of the bytes may have been transferred.
  Status status;
};

// The backend of a queue, for display.
struct QueueMode {
  std::string name;         // "io_uring" or "threads".
  bool registered = false;  // The buffers are registered with the kernel.
  std::string reason;       // Why not io_uring with registered buffers; empty if it is.
};

// A queue of requests. One thread owns a queue; a process may have many queues.
class IoQueue {
 public:
  virtual ~IoQueue() = default;  // Waits for all requests in flight.

  virtual const QueueMode& mode() const = 0;

  // Registers `memory`, that of most requests, with the kernel if the queue can: then the kernel
  // does not pin its pages at every direct request. It pins all of them now, which takes longer
  // than reads of cached bytes. `memory` must outlive the queue. Only the first call has an effect.
  virtual void register_memory(MutableBytes memory) { (void)memory; }

  // Number of requests that `submit` accepts now. Bounded, so memory in flight is bounded.
  virtual int room() const = 0;
  virtual int in_flight() const = 0;

  // Submits requests and returns without waiting for the device. Requests may complete in any
  // order.
  // Requires: requests.size() <= room().
  virtual void submit(std::span<const IoRequest> requests) = 0;

  // Waits until at least one request is complete. The result is valid until the next call.
  // Requires: in_flight() > 0.
  virtual std::span<const IoDone> wait() = 0;
};

// Operations on paths. Safe to call from any thread. Paths are operating system paths.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual const Traits& traits() const;

  virtual Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                             Caching caching) = 0;

  // Opens a file to read, which has this length by what the caller knows of it. A store needs no
  // request then, and a file that is missing or shorter fails the reads.
  virtual Result<std::unique_ptr<File>> open_known(const std::string& path, int64_t nbytes,
                                                   Caching caching) {
    (void)nbytes;
    return open(path, OpenMode::kRead, caching);
  }

  // Creates directory `path` and all missing parents. Syncs the parent of each created directory.
  virtual Status create_directories(const std::string& path) = 0;

  // Returns the names in a directory, sorted, without "." and "..".
  virtual Result<std::vector<std::string>> list_directory(const std::string& path) = 0;

  // Renames a file atomically: a reader sees the old or the new file under `to`. The rename
  // survives a power cut only after `sync_directory` of the parent of `to`.
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  // A file system that publishes by condition may return OK if there is no file.
  virtual Status remove(const std::string& path) = 0;

  // Removes all files in a folder and its folders, those of metadata first. Only if a folder is a
  // prefix of names.
  virtual Status remove_all(const std::string& path);

  // Returns when a file or directory was written, by the clock of the file system: seconds since
  // 1970.
  virtual Result<double> modified_s(const std::string& path);

  virtual Status sync_directory(const std::string& path) = 0;

  // Makes a queue for up to `depth` requests.
  virtual std::unique_ptr<IoQueue> make_queue(int depth) = 0;

  // Returns whether `rename` is atomic and cheap for a directory in `parent`, and fails if `to` is
  // a directory that is not empty. False also if it is unknown.
  virtual bool renames_directories(const std::string& parent) {
    (void)parent;
    return false;
  }

  // Gives a file another name, without moving its bytes through this process: a hard link, or a
  // copy within the store. The link sets the file's modification time to now. With `sync`, its
  // bytes survive a power cut, and the name does after `sync_directory` of the parent of `to`.
  // Errors: kNotFound; kUnsupported if the file system cannot link these two; kStorage with
  // EEXIST, except on a store, which replaces `to`.
  virtual Status link(const std::string& from, const std::string& to, bool sync);

  // Exchanges two files or directories atomically.
  // Errors: errno ENOSYS or EINVAL if the file system has no such operation.
  virtual Status exchange(const std::string& one, const std::string& other);

  // Writes a whole file, durably, on a file system that does not write at offsets. With kCreate,
  // the file must not exist. Readers never see an incomplete file.
  // Errors: kStorage with EEXIST.
  virtual Status put(const std::string& path, Bytes bytes, OpenMode mode);

  // Returns a text that changes whenever the file is replaced; empty if no file exists. Only for
  // file systems that publish by condition.
  virtual Result<std::string> version(const std::string& path);

  // Writes a whole file if its version is this one. Errors: kStorage with EEXIST if it is not.
  virtual Status publish(const std::string& path, Bytes bytes, const std::string& version);
};

// Returns the parent directory of `path`: "a" for "a/b" and "a/b/", "." for "b", "/" for "/b".
std::string parent_directory(std::string_view path);

// Creates file `path` with these bytes, and syncs it if `sync` is set. After an error the file may
// exist with a subset of the bytes. With kUpdate, writes to an empty file instead.
Status write_file(FileSystem& fs, const std::string& path, Bytes bytes, bool sync,
                  OpenMode mode = OpenMode::kCreate);

// The length of the pieces of a copy, at most.
constexpr int64_t kPieceNbytes = int64_t{8} << 20;

// Copies a file, durably, in pieces of `piece_nbytes`. `check` gets the offset and the bytes of
// each piece before it is written, in order; an error of it ends the copy. After an error the
// target may exist with a subset of the bytes.
Status copy_file(FileSystem& from, const std::string& source, FileSystem& to,
                 const std::string& target,
                 const std::function<Status(int64_t offset, Bytes piece)>& check = {},
                 int64_t piece_nbytes = kPieceNbytes);

}  // namespace torch_ckpt
