#pragma once

// Upload: an object that is written as a stream, by requests of an `IoQueue`. Used by the files of
// `StoreFileSystem`.
//
// A client of a store pulls the bytes, in its own thread. The writer pushes them, from the threads
// of a queue. A write returns once the client no longer needs its memory, so the memory in flight
// is what the writer has in flight, and nothing is copied. Only an object that fits one part is
// copied, and written in one request at its end.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "io/object_store.h"

namespace torch_ckpt {

// Length of the parts of an object of so many bytes. It may grow to twice that.
int64_t part_nbytes(int64_t object_nbytes);

class Upload {
 public:
  // Requires: `store` outlives the upload.
  Upload(ObjectStore& store, std::string path) : store_(store), path_(std::move(path)) {}
  ~Upload();  // Abandons an upload that has not finished.
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Sets the length that the object will have at least, which determines that of its parts.
  // Requires: no byte was written.
  void expect(int64_t nbytes);

  // Passes bytes to the client, after all bytes before `offset`, and waits until the client has
  // released them. The client may hold up to a part until more bytes arrive, or the end.
  // Several threads may call it. Requires: the offsets are those of a file without gaps.
  Status write(int64_t offset, Bytes bytes);

  // Waits for all bytes before `nbytes`, ends the object, and waits until the store has it.
  Status finish(int64_t nbytes);

  // Makes every call fail from now on, also those that wait.
  void abandon();

 private:
  class Source;

  void start();
  void run();
  Status state() const;  // Requires: the lock.

  ObjectStore& store_;
  const std::string path_;
  int64_t expected_nbytes_ = 0;
  std::thread thread_;  // The client's.

  mutable std::mutex mutex_;  // Guards the members below.
  std::condition_variable changed_;
  std::vector<std::byte> small_;  // The bytes of an object that may fit one part.
  std::deque<Window> windows_;    // Those that the client has not pulled yet.
  int64_t end_ = 0;               // End of all bytes that were passed on.
  bool is_complete_ = false;      // No more windows follow.
  bool is_abandoned_ = false;
  bool has_started_ = false;
  bool is_done_ = false;  // The client has returned.
  Status status_;         // What it returned.
};

}  // namespace torch_ckpt
