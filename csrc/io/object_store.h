#pragma once

// The interface to a client of an object store, or of another service that stores whole objects.
//
// An object is written whole, and appears whole. It has no offsets to write at, and cannot be
// renamed. `StoreFileSystem` makes a `FileSystem` of it. The bindings implement it over clients
// that are Python libraries; tests implement it in memory.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "io/window.h"

namespace torch_ckpt {

// The bytes of an object that is being uploaded, in order.
class Windows {
 public:
  virtual ~Windows() = default;

  // Waits for the next bytes. Returns nullopt at the end of the object.
  // Errors: kCancelled if the upload must be abandoned.
  virtual Result<std::optional<Window>> next() = 0;
};

// What must be true of an object for a `put` to replace it.
struct Condition {
  enum class Kind { kNone, kAbsent, kVersion };

  Kind kind = Kind::kNone;
  std::string version = {};  // For kVersion: as `ObjectStore::find` returned it.
};

// Safe to call from any thread. Paths begin with the name of the bucket.
class ObjectStore {
 public:
  struct Found {
    int64_t nbytes = 0;            // Length of the object.
    std::string version;           // Differs for an object that replaces this one.
    double modified_s = 0;         // When it was written, in seconds since 1970.
    std::vector<std::byte> start;  // Its first bytes.
  };

  virtual ~ObjectStore() = default;

  // Finds an object, and reads at most `start_nbytes` of its first bytes, in one request.
  // Errors: kNotFound, also for a path under which there are objects.
  virtual Result<Found> find(const std::string& path, int64_t start_nbytes) = 0;

  // Reads exactly these bytes. Errors: kCorruption if the object ends earlier.
  virtual Result<Window> get(const std::string& path, int64_t offset, int64_t nbytes) = 0;

  // Writes an object in one request.
  // Errors: kStorage with EEXIST if the condition is false.
  virtual Status put(const std::string& path, Bytes bytes, const Condition& condition) = 0;

  // Writes an object in parts of `part_nbytes`, several at a time, while the windows arrive. After
  // an error there is no object, and no window is in use.
  virtual Status put_stream(const std::string& path, int64_t part_nbytes, Windows& windows) = 0;

  // Returns the names of the objects and folders in a folder, in any order.
  virtual Result<std::vector<std::string>> list(const std::string& path) = 0;

  // Whether `copy` leaves `from` there, and the store itself copies. Otherwise `copy` may rename.
  virtual bool copies() const { return false; }

  // Copies an object within the store, and replaces `to`. Errors: kNotFound.
  virtual Status copy(const std::string& from, const std::string& to) = 0;

  // Removes an object. OK if it does not exist.
  virtual Status remove(const std::string& path) = 0;

  // Removes all objects in a folder and its folders, those of metadata first.
  virtual Status remove_all(const std::string& path) = 0;
};

}  // namespace torch_ckpt
